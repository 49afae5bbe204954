"""DistKV-LLM as a policy: `distkv`."""

from dataclasses import replace

import pytest
from lenders import held, leased, plan_of
from snapshots import snapshot_of, waiting

from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.cost.network import Network
from loong.scheduler.tuning import LEAST_SWAP, LENT_BLOCK

LEAST = LEAST_SWAP * LENT_BLOCK


@pytest.mark.parametrize(
    ("near", "lender", "refused"),
    [((480, 420), 2, ""), ((480, 490), 3, "; 1, 2 had too little room and came first")],
)
def test_a_full_instance_borrows_from_the_nearest_and_then_roomiest_that_has_it_all(
    near: tuple[int, int], lender: int, refused: str
) -> None:
    """Instance 3 has most room, on another host. Instance 0 uses least memory, so that requests go there."""
    views = [held(f"r{i}", (i, n)) for i, n in enumerate((400, *near, 500))]
    batches = [leased(i, i, view) for i, view in enumerate(views)]
    snapshot = snapshot_of([500, 600, 600, 900], [*views, waiting("w", 100, 20)], batches)
    apart = tuple(replace(i, host_id=int(i.instance_id == 3)) for i in snapshot.instances)
    cost_model = WorkCostModel(network=Network((0, 0, 0, 1), slowdown=10.0))
    plan = plan_of("distkv", replace(snapshot, instances=apart), cost_model)
    assert [m.link for m in plan.migrations] == [(0, lender)]
    num_tokens = len(plan.migrations[0].segment.positions)
    assert num_tokens % LENT_BLOCK == 0
    chosen = f"instance 0 borrows room for {num_tokens} tokens of its KV from {lender}: it is full{refused}"
    assert chosen in [decision.chosen for decision in plan.decisions]


def test_nobody_lends_what_no_candidate_has_whole() -> None:
    views = [held(f"r{i}", (i, 500)) for i in range(3)]
    batches = [leased(i, i, view) for i, view in enumerate(views)]
    plan = plan_of("distkv", snapshot_of([600] * 3, [*views, waiting("w", 480, 20)], batches))
    assert plan.migrations == ()


def test_debts_along_a_cycle_are_swapped_home() -> None:
    debts = [held("a", (1, 200), (0, 50)), held("b", (2, 150), (1, 50)), held("c", (0, 300), (2, 50))]
    batches = [leased(i, i, view) for i, view in enumerate(debts)]
    plan = plan_of("distkv", snapshot_of([900] * 3, debts, batches))
    assert {(m.segment.owner_id, m.link) for m in plan.migrations} == {
        ("a", (1, 0)),
        ("b", (2, 1)),
        ("c", (0, 2)),
    }
    assert {len(m.segment.positions) for m in plan.migrations} == {150 // LENT_BLOCK * LENT_BLOCK}
    assert all("swapped along a cycle of 3 debts" in decision.chosen for decision in plan.decisions)


def test_swaps_wait_for_slots_and_small_debts_stay() -> None:
    few = [held("a", (1, LEAST - 1), (0, 50)), held("b", (0, 300), (1, 50))]
    batches = [leased(i, i, view) for i, view in enumerate(few)]
    assert plan_of("distkv", snapshot_of([900] * 2, few, batches)).migrations == ()
    debts = [held("a", (1, 200), (0, 50)), held("b", (0, 300), (1, 50))]
    batches = [leased(i, i, view) for i, view in enumerate(debts)]
    assert plan_of("distkv", snapshot_of([366 + 20, 900], debts, batches)).migrations == ()
    assert len(plan_of("distkv", snapshot_of([900] * 2, debts, batches)).migrations) == 2


def test_kv_that_is_at_rest_or_moves_already_stays() -> None:
    debts = [held("a", (1, 200), (0, 50)), held("b", (0, 300), (1, 50))]
    at_rest = snapshot_of([900] * 2, debts, [leased(0, 0, debts[0])])
    assert plan_of("distkv", at_rest).migrations == ()
    moving = [replace(debts[0], is_migrating=True), debts[1]]
    batches = [leased(i, i, view) for i, view in enumerate(moving)]
    assert plan_of("distkv", snapshot_of([900] * 2, moving, batches)).migrations == ()


def test_a_loan_that_no_request_there_has_enough_kv_for_is_not_asked_for() -> None:
    short, other = held("short", (0, 1), max_tokens=90), held("other", (1, 300))
    batches = [leased(0, 0, short), leased(1, 1, other)]
    snapshot = snapshot_of([200, 900], [short, other, waiting("w", 150, 20), waiting("x", 150, 20)], batches)
    assert plan_of("distkv", snapshot).migrations == ()


def test_swaps_move_only_what_can_be_copied_now() -> None:
    """Request "c" is at rest: it owes as "a" does, and stays."""
    debts = [held("a", (1, 200), (0, 50)), held("b", (0, 300), (1, 50)), held("c", (1, 200), (0, 50))]
    batches = [leased(0, 0, debts[0]), leased(1, 1, debts[1])]
    moves = plan_of("distkv", snapshot_of([1200] * 2, debts, batches)).migrations
    assert {m.segment.owner_id for m in moves} == {"a", "b"}
