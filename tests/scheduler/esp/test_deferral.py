"""Late prompts tie no instances together while others fill these, and go on as soon as they do not."""

from dataclasses import replace

import pytest
from machines import H200
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.plan import IterationPlan
from loong.core.request import SLO, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.planner import plan_esp

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


def dops(plan: IterationPlan) -> list[int]:
    return sorted(batch.group.dop for batch in plan.batches)


def test_a_late_prompt_on_all_instances_leaves_each_to_itself_while_others_have_enough_to_do() -> None:
    plan = planned(snapshot_with(late(), *map(urgent, range(8))))
    assert dops(plan) == [1, 1, 1, 1]
    assert not computes(plan, "late")
    assert all(batch.group.dop < len(batch.request_ids) for batch in plan.batches)  # a prompt with its decode
    (wait,) = (d for d in plan.decisions if d.request_ids == ("late",))
    assert "need not wait for each other" in wait.chosen


@pytest.mark.parametrize("others", [[], [urgent(0, 50)]])
def test_it_goes_on_where_others_leave_it_something(others: list[RequestView]) -> None:
    plan = planned(snapshot_with(late(), *others))
    assert computes(plan, "late")
    assert dops(plan) == [4]


def test_of_several_the_oldest_has_its_share_of_the_time() -> None:
    views = [late(), late("newer", arrival_time=50.0), *map(urgent, range(8))]
    plan = planned(snapshot_with(*views), deferred_share=0.9)
    assert computes(plan, "late")
    assert not computes(plan, "newer")


def test_nor_does_it_take_instances_that_it_is_not_on() -> None:
    plan = planned(snapshot_with(late(held=(0,)), *map(urgent, range(8))))
    assert dops(plan) == [1, 1, 1, 1]
    assert not computes(plan, "late")


def test_a_short_one_on_a_single_instance_stays_in_its_place() -> None:
    short = replace(begun("late", 900, 100, (0,)), slo=SLO(1.0, 1.0), arrival_time=0.0)
    plan = planned(snapshot_with(short, *map(urgent, range(2))))
    assert computes(plan, "late")


def test_where_nothing_else_can_run_and_nothing_runs_they_go_on() -> None:
    others = [urgent(n, 300_000) for n in range(8)]
    held = late()
    num_free = 100_000
    capacities = [held.placement.tokens_by_instance()[i] + num_free // 4 for i in range(4)]
    snapshot = snapshot_of(capacities, [held, *others], now=NOW)
    plan = planned(snapshot)
    assert plan.batches or plan.failures or plan.preemptions


def test_while_anything_runs_they_may_wait_for_it() -> None:
    lone = decoding("d", 2000, (0,), max_tokens=900)
    before = planned(snapshot_of(ROOM, [lone]))
    (lease,) = before.batches
    batch = running(1, lease, started_at=NOW)
    snapshot = snapshot_of(ROOM, [lone, late(held=(0, 1)), *map(urgent, range(12))], [batch], now=NOW)
    plan = planned(snapshot)
    assert not computes(plan, "late")
    assert dops(plan) == [1, 1, 1]
