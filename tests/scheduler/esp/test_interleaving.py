"""Prompts and decodes in turn: who is due, and that no fixed cost of a group's steps makes it collapse."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import pytest
from machines import H200, H200_CAPACITY
from simulation import simulate, timed_request
from snapshots import begun, decoding, snapshot_of, waiting

from loong.core.cost.cost_model import CostModel, HostTimes, PrefillTerms
from loong.core.cost.work import InstanceWork, Phase, StepWork
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.esp.interleaving import PrefillDecodeInterleaving
from loong.scheduler.esp.policy import plan_esp

LENGTHS = (300, 9_000, 25_000, 700, 4_000, 15_000)
LOAD = [timed_request(n, LENGTHS[n % 6], 20 + 17 * n % 60, 0.08 * n) for n in range(40)]


@dataclass(frozen=True)
class EagerGroups:
    """Groups take `seconds` more for a step of one phase, whose kernels start one by one.

    Where queries travel in it they take `seconds_by_exchange`, if that is given.
    """

    base: CostModel
    seconds: float
    phase: Phase = Phase.MIXED
    seconds_by_exchange: float | None = None

    @property
    def host(self) -> HostTimes:
        return self.base.host

    def step_time(self, work: StepWork, /) -> float:
        if work.group.dop == 1 or work.phase is not self.phase:
            return self.base.step_time(work)
        by_exchange = self.seconds if self.seconds_by_exchange is None else self.seconds_by_exchange
        return self.base.step_time(work) + (by_exchange if work.has_exchange else self.seconds)

    def served_time(self, work: InstanceWork, /) -> float:
        return self.base.served_time(work)

    def instance_time(self, work: InstanceWork, /) -> float:
        return self.base.instance_time(work)

    def prefill_terms(self, dop: int, /) -> PrefillTerms:
        return self.base.prefill_terms(dop)

    def migration_time(self, num_tokens: int, source_id: InstanceId, destination_id: InstanceId, /) -> float:
        return self.base.migration_time(num_tokens, source_id, destination_id)

    def copying_time(self, num_tokens: int, /) -> float:
        return self.base.copying_time(num_tokens)


def with_exchange(seconds: float) -> WorkCostModel:
    """Return an H200 on which every step in which queries travel takes these seconds more."""
    return replace(H200, coefficients=replace(H200.coefficients, exchange=seconds))


@cache
def end_of_single_instances() -> float:
    """Return when `LOAD` ends on instances that form no groups, whose decodes wait for all prompts."""
    return simulate("replicas", [H200_CAPACITY] * 2, LOAD, cost_model=H200).ended_at


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.03, 0.1, 1.0])
@pytest.mark.parametrize("make", [with_exchange, lambda seconds: EagerGroups(H200, seconds)])
def test_however_much_a_step_of_a_group_costs_a_load_keeps_its_pace_and_ends_soon(
    make: Callable[[float], CostModel], seconds: float
) -> None:
    elastic = simulate("esp", [H200_CAPACITY] * 2, LOAD, cost_model=make(seconds))
    assert elastic.ended_at <= 2.5 * end_of_single_instances()
    for request in LOAD:
        times = elastic.token_times[request.request_id]
        assert (times[-1] - times[0]) / (len(times) - 1) <= PolicyConfig().target_tpot


def decode(num_output: int, last_token_time: float = 0.0) -> RequestView:
    """With KV on two instances; its first token came at 0."""
    view = decoding("d", 1_000, (0, 1), max_tokens=99, num_output=num_output)
    return replace(view, first_token_time=0.0, last_token_time=last_token_time)


def planned(model: CostModel, view: RequestView, now: float) -> BatchPlan:
    """Return the next batch of a group where a prompt waits that wants all of it."""
    snapshot = snapshot_of([50_000, 50_000], [view, waiting("p", 60_000, arrival_time=now)], now=now)
    (batch,) = plan_esp(snapshot, model, PolicyConfig()).batches
    return batch


def test_where_a_step_of_both_costs_little_prompts_go_beside_decodes() -> None:
    assert set(planned(H200, decode(2), 0.04).request_ids) == {"d", "p"}


def test_where_a_step_of_both_costs_much_prompts_and_decodes_take_turns() -> None:
    model = EagerGroups(H200, 0.1)
    lease = planned(model, decode(2), now=0.04)
    assert lease.request_ids == ("d",)
    assert 1 < lease.num_steps < PolicyConfig().lease_steps
    assert planned(model, decode(20), now=0.1).request_ids == ("p",)


def test_as_many_decode_steps_are_due_as_make_up_for_a_chunk() -> None:
    interleaving = PrefillDecodeInterleaving(decode_seconds=0.01, target=0.05)
    num_due = interleaving.num_due([decode(1)], 0.0, seconds=0.1, most_steps=16)
    assert (num_due - 1) * interleaving.saved < 0.1 - interleaving.pace <= num_due * interleaving.saved
    assert interleaving.num_due([decode(20)], 0.0, seconds=0.1, most_steps=16) == 0
    assert interleaving.num_due([decoding("d", 9, (0,))], 5.0, seconds=0.1, most_steps=16) == 0


def test_decodes_too_far_behind_are_due_only_after_a_pause() -> None:
    interleaving = PrefillDecodeInterleaving(decode_seconds=0.01, target=0.05)
    assert interleaving.num_due([decode(2, last_token_time=99.999)], 100.0, seconds=0.1, most_steps=16) == 0
    assert 0 < interleaving.num_due([decode(2, last_token_time=99.9)], 100.0, seconds=0.1, most_steps=16) < 16
    assert interleaving.num_due([decode(2, last_token_time=90.0)], 100.0, seconds=0.1, most_steps=16) == 16


@pytest.mark.parametrize("decode_seconds", [0.001, 0.03, 0.042, 0.05, 1.0])
def test_prompts_have_a_share_however_slow_decodes_are(decode_seconds: float) -> None:
    interleaving = PrefillDecodeInterleaving(decode_seconds, target=0.05)
    assert interleaving.prompt_share >= (0.5 if interleaving.is_hopeless else 0.2) - 1e-9
    assert interleaving.is_hopeless or interleaving.pace <= 0.0532


@pytest.mark.parametrize("by_ring", [0.0, 0.06, 0.2])
@pytest.mark.parametrize("by_exchange", [0.0, 0.03, 0.17, 0.5])
def test_the_share_of_a_late_prompt_does_not_make_a_step_of_prompts_mostly_overhead(
    by_exchange: float, by_ring: float
) -> None:
    model = EagerGroups(H200, by_ring, Phase.PREFILL, seconds_by_exchange=by_exchange)
    late = [begun(request_id, 8_000, 160, (0, 1)) for request_id in "ab"]
    snapshot = snapshot_of([400_000] * 2, [*late, waiting("new", 19_410, arrival_time=498.0)], now=500.0)
    (batch,) = plan_esp(snapshot, model, PolicyConfig()).batches
    num_tokens = sum(len(query.positions) for query in batch.queries)
    assert batch.predicted_time is not None
    assert num_tokens * model.prefill_terms(2).per_token >= batch.predicted_time / 3
