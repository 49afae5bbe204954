"""Contexts that one instance reads too slowly: several instances take the steps, each reads what it holds."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import H200, H200_CAPACITY
from simulation import simulate, timed_request
from snapshots import begun, decoding, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.decision import DecisionKind
from loong.core.instance import Service
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.request import SLO, RequestView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

EIGHT = [H200_CAPACITY] * 8
HOLDERS = tuple(range(7))
PROMPTS = waiting("long prompt", 200_000), waiting("another", 150_000)


def planned(*views: RequestView, name: str = "esp") -> IterationPlan:
    snapshot = snapshot_of(EIGHT, views)
    plan = make_policy(name, PolicyConfig())(snapshot, H200)
    check_plan(snapshot, plan)
    return plan


def long_context(num_tokens: int = 300_000, tpot: float = 0.01, max_tokens: int = 40) -> RequestView:
    view = decoding("r", num_tokens, HOLDERS, max_tokens=max_tokens)
    return replace(view, slo=SLO(10.0, tpot))


def lease_of(plan: IterationPlan, request_id: str = "r") -> BatchPlan | None:
    return next((batch for batch in plan.batches if request_id in batch.request_ids), None)


def test_the_instances_that_hold_a_context_too_long_for_one_take_all_its_steps_before_prompts() -> None:
    plan = planned(long_context(), *PROMPTS)
    lease = lease_of(plan)
    assert lease is not None
    assert (lease.group.instance_ids, lease.num_steps) == (HOLDERS, 39)
    assert lease.predicted_time is not None
    assert lease.predicted_time <= 0.01
    assert plan.batches == (lease,)
    (reason,) = [d for d in plan.decisions if d.kind is DecisionKind.DOP and d.request_ids == ("r",)]
    assert min(reason.alternatives, key=lambda a: a.cost).what == reason.chosen


@pytest.mark.parametrize(
    ("view", "name"),
    [
        (long_context(tpot=0.05), "esp"),
        (long_context(num_tokens=20_000), "esp"),
        (long_context(tpot=0.001), "esp"),
        (long_context(), "esp-no-masters"),
    ],
    ids=["loose", "short", "hopeless", "ablation"],
)
def test_others_have_one_instance_and_prompts_go_on(view: RequestView, name: str) -> None:
    plan = planned(view, *PROMPTS, name=name)
    lease = lease_of(plan)
    assert lease is None or lease.group.dop == 1
    assert any({"long prompt", "another"}.intersection(batch.request_ids) for batch in plan.batches)


@pytest.mark.parametrize(("ttft", "is_first"), [(60.0, True), (3.8, False)])
def test_no_prompt_is_late_by_the_pause(ttft: float, is_first: bool) -> None:
    prompt = replace(waiting("p", 200_000), slo=SLO(ttft, 0.05))
    lease = lease_of(planned(long_context(max_tokens=60), prompt))
    assert (lease is not None and lease.group.dop == 7) == is_first


def test_an_instance_that_serves_chunks_of_a_long_prompt_is_no_second_one_for_decodes() -> None:
    unfinished = begun("p", 400_000, 300_000, HOLDERS)
    there = [replace(decoding(f"d{n}", 13_500, (6,)), slo=SLO(10.0, 0.008)) for n in range(2)]
    plan = planned(*there, unfinished, name="esp-no-moves")
    leases = [batch for batch in plan.batches if batch.num_steps > 1]
    assert [lease.group.instance_ids for lease in leases] == [(7,)]


@pytest.mark.parametrize(
    ("serves", "name"), [(Service.ALL, "esp"), (Service.OWN_HOST, "esp"), (Service.ALL, "esp-no-masters")]
)
def test_all_tokens_come_and_those_of_long_contexts_in_time(serves: Service, name: str) -> None:
    lengths = [310_000, 300, 280_000, 60_000, 330_000, 2_000]
    requests = [
        replace(timed_request(n, length, 30 + n, n * 0.5), slo=SLO(60.0, 0.01))
        for n, length in enumerate(lengths)
    ]
    run = simulate(name, EIGHT, requests, cost_model=H200, serves=serves)
    assert [len(run.tokens[r.request_id]) for r in requests] == [30 + n for n in range(6)]
    assert run.stats.num_preemptions == 0
    assert (run.stats.num_group_leases > 0) == (name == "esp")


@given(seed=st.integers(0, 2**32))
def test_a_lease_of_several_instances_meets_the_targets_of_its_requests(seed: int) -> None:
    random = Random(seed)
    tpots = {f"r{n}": random.choice((0.006, 0.008, 0.01, 0.015)) for n in range(random.randint(1, 5))}
    views = [
        replace(
            decoding(r, random.randint(1_000, 500_000), HOLDERS, max_tokens=random.randint(2, 90)),
            slo=SLO(10.0, tpot),
        )
        for r, tpot in tpots.items()
    ]
    plan = planned(*views, *PROMPTS)
    for batch in plan.batches:
        if batch.num_steps > 1 and batch.group.dop > 1:
            assert batch.predicted_time is not None
            assert batch.predicted_time <= min(tpots[r] for r in batch.request_ids) * 1.01
