"""Late prompts take no time from others that fill the cluster, and go on as soon as these do not."""

from dataclasses import replace

import pytest
from machines import H200
from snapshots import begun, decoding, snapshot_of, waiting

from loong.core.plan import IterationPlan
from loong.core.request import SLO, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.policy import plan_esp
from loong.scheduler.esp.reasons import WaitReason

ROOM = [2_000_000] * 4
NOW = 100.0


def late(name: str = "late", held: tuple[int, ...] = (0, 1, 2, 3), arrival_time: float = 0.0) -> RequestView:
    """Return a prompt that has missed its target long ago, computed in part."""
    view = begun(name, 400_000, 200_000, held)
    return replace(view, slo=SLO(1.0, 1.0), arrival_time=arrival_time)


def urgent(number: int, num_tokens: int = 6000) -> RequestView:
    return waiting(f"p{number}", num_tokens, arrival_time=NOW, slo=SLO(9.0, 1.0))


def snapshot_with(*views: RequestView) -> Snapshot:
    decodes = [decoding(f"d{i}", 2000, (i,), max_tokens=900) for i in range(4)]
    return snapshot_of(ROOM, [*views, *decodes], now=NOW)


def planned(snapshot: Snapshot, deferred_share: float = 0.0) -> IterationPlan:
    return plan_esp(snapshot, H200, PolicyConfig(deferred_share=deferred_share))


def computes(plan: IterationPlan, request_id: str) -> bool:
    return any(request_id in batch.request_ids for batch in plan.batches)


@pytest.mark.parametrize("held", [(0,), (0, 1, 2, 3)])
def test_a_late_prompt_pauses_while_others_have_enough_to_do(held: tuple[int, ...]) -> None:
    plan = planned(snapshot_with(late(held=held), *map(urgent, range(8))))
    assert not computes(plan, "late")
    assert computes(plan, "p0")
    (wait,) = (d for d in plan.decisions if d.request_ids == ("late",))
    assert wait.chosen == WaitReason.PAUSED_LATE


@pytest.mark.parametrize("others", [[], [urgent(0, 50)]])
def test_it_goes_on_where_others_leave_it_something(others: list[RequestView]) -> None:
    assert computes(planned(snapshot_with(late(), *others)), "late")


def test_of_several_the_oldest_has_its_share_of_the_time() -> None:
    views = [late(), late("newer", arrival_time=50.0), *map(urgent, range(8))]
    plan = planned(snapshot_with(*views), deferred_share=0.9)
    assert computes(plan, "late")
    assert not computes(plan, "newer")


def test_a_short_one_on_a_single_instance_does_not_pause() -> None:
    short = replace(begun("late", 900, 100, (0,)), slo=SLO(1.0, 1.0), arrival_time=0.0)
    plan = planned(snapshot_with(short, *map(urgent, range(2))))
    assert WaitReason.PAUSED_LATE not in {decision.chosen for decision in plan.decisions}


def test_where_nothing_else_can_run_and_nothing_runs_they_go_on() -> None:
    others = [urgent(n, 300_000) for n in range(8)]
    held, num_free = late(), 100_000
    capacities = [held.placement.tokens_by_instance()[i] + num_free // 4 for i in range(4)]
    plan = planned(snapshot_of(capacities, [held, *others], now=NOW))
    assert plan.batches or plan.preemptions
