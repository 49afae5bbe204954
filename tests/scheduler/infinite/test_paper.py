"""Infinite-LLM's Algorithm 1 as a policy: `infinite-paper`."""

from dataclasses import replace

from lenders import held, leased, plan_of
from simulation import simulate, timed_request
from snapshots import snapshot_of, waiting

from loong.core.instance import ESPGroup
from loong.core.placement import KVSegment
from loong.core.plan import KVMigration
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.infinite.paper import StepModel
from loong.scheduler.tuning import MOVED_PER_STEP

READING = WorkCostModel(Coefficients(decode_key=20e-6))
"""Reading KV takes much of a step, as it does with long contexts."""


def test_kv_moves_though_nobody_waits_if_the_pair_makes_more_tokens() -> None:
    long = held("long", (0, 3000))
    snapshot = snapshot_of([4000, 4000], [long], [leased(0, 0, long)])
    plan = plan_of("infinite-paper", snapshot, READING)
    assert [(m.segment.owner_id, m.link) for m in plan.migrations] == [("long", (0, 1))]
    assert plan.migrations[0].segment.positions.start == 0
    assert not plan_of("infinite", snapshot, READING).migrations
    (decision,) = (d for d in plan.decisions if "borrows" in d.chosen)
    assert "instance 0 borrows room for" in decision.chosen


def test_a_move_takes_no_more_tokens_than_its_lease_has_steps_for_and_ends_it() -> None:
    long = held("long", (0, 3000))
    plan = plan_of("infinite-paper", snapshot_of([4000, 4000], [long], [leased(0, 0, long)]), READING)
    num_moved = sum(len(m.segment.positions) for m in plan.migrations)
    (end,) = plan.lease_ends
    assert num_moved == MOVED_PER_STEP * 14
    assert end.step == 1 + 14
    single = leased(0, 0, long, num_steps=1)
    plan = plan_of("infinite-paper", snapshot_of([4000, 4000], [long], [single]), READING)
    assert sum(len(m.segment.positions) for m in plan.migrations) == MOVED_PER_STEP
    assert plan.lease_ends == ()


def test_what_is_lent_hides_behind_what_stays() -> None:
    """Figure 6a: no creditor reads longer for a debtor than the debtor itself, as it would wait then."""
    run = simulate("infinite-paper", [4000, 4000], [timed_request(0, 1000, 400)], cost_model=READING)
    assert run.stats.num_migrated_tokens
    shares = [
        view.placement.tokens_by_instance()
        for snapshot, _ in run.plans
        for view in snapshot.running
        if len(view.placement.instance_ids) > 1
    ]
    assert shares
    assert all(min(held.values()) <= max(held.values()) for held in shares)
    for held_ in shares:
        newest, lent = max(held_.values()), min(held_.values())
        assert lent <= newest


def test_a_debtor_with_room_takes_kv_back_before_anything_is_lent() -> None:
    debtor, busy = held("debtor", (1, 300), (0, 300)), [held(f"b{i}", (1, 60)) for i in range(8)]
    batches = [leased(0, 0, debtor), leased(1, 1, *busy)]
    plan = plan_of("infinite-paper", snapshot_of([2000, 2000], [debtor, *busy], batches), READING)
    assert [m.link for m in plan.migrations] == [(1, 0)]
    assert "takes back" in plan.decisions[0].chosen


def test_kv_stays_lent_where_taking_it_back_makes_fewer_tokens() -> None:
    debtor = held("debtor", (1, 300), (0, 300))
    plan = plan_of("infinite-paper", snapshot_of([2000, 2000], [debtor], [leased(0, 0, debtor)]), READING)
    assert not any("takes back" in decision.chosen for decision in plan.decisions)


def test_a_creditor_that_lacks_room_reclaims_it() -> None:
    debtor, own = held("debtor", (0, 110), (1, 40), max_tokens=100), held("own", (0, 10))
    beside, third = held("beside", (1, 1)), held("third", (2, 230))
    batches = [leased(0, 0, own), leased(1, 1, debtor, beside), leased(2, 2, third)]
    views = [debtor, own, beside, third, waiting("w", 240, 20)]
    plan = plan_of("infinite-paper", snapshot_of([400, 250, 300], views, batches))
    assert [m.link for m in plan.migrations] == [(0, 1)]
    assert "needs the room" in plan.decisions[0].chosen


def test_no_round_begins_while_kv_moves_and_kv_at_rest_stays() -> None:
    long = held("long", (0, 3000))
    at_rest = snapshot_of([4000, 4000], [long])
    assert plan_of("infinite-paper", at_rest, READING).migrations == ()
    snapshot = snapshot_of([4000, 4000], [long], [leased(0, 0, long)])
    (view,) = snapshot.running
    move = KVMigration(KVSegment("long", range(16), 0), 1)
    moving = replace(snapshot, running=(replace(view, is_migrating=True),), migrations=(move,))
    assert plan_of("infinite-paper", moving, READING).migrations == ()


def test_the_debtors_batch_is_bounded_by_the_step_that_computing_fills() -> None:
    model = StepModel(WorkCostModel(Coefficients(step=1e-3, weights=3e-3, token=10e-6)))
    assert model.debtor_batch == 400
    assert model.seconds(2, 3) == model.seconds(2, 3)
    assert ESPGroup((0,)).dop == 1


def test_more_requests_decode_at_once_where_they_wait_for_room() -> None:
    """One long request fills its instance, and the other has room that short ones could not use there."""
    requests = [timed_request(0, 1900, 300), *(timed_request(n, 300, 30, 0.05) for n in range(1, 9))]
    config = PolicyConfig(lease_steps=16)
    run = simulate("infinite-paper", [2300, 4000], requests, config=config, cost_model=READING)
    assert run.stats.num_migrated_tokens
    assert run.stats.num_served_leases
    assert run.stats.num_preemptions == 0


def test_a_lease_hides_the_first_moves_and_later_ones_wait_for_the_next() -> None:
    debtor = held("debtor", (1, 300), (2, 300), (0, 300))
    busy = [held(f"b{i}", (1 + i % 2, 60)) for i in range(16)]
    batches = [leased(0, 0, debtor), leased(1, 1, *busy[::2]), leased(2, 2, *busy[1::2])]
    plan = plan_of("infinite-paper", snapshot_of([2000] * 3, [debtor, *busy], batches), READING)
    assert [(m.link, len(m.segment.positions)) for m in plan.migrations] == [((1, 0), MOVED_PER_STEP * 14)]


def test_a_creditor_that_cannot_get_enough_room_back_gets_none() -> None:
    debtor, own = held("debtor", (0, 110), (1, 40), max_tokens=100), held("own", (0, 10))
    beside, third = held("beside", (1, 92)), held("third", (2, 230))
    batches = [leased(0, 0, own), leased(1, 1, debtor, beside), leased(2, 2, third)]
    views = [debtor, own, beside, third, waiting("w", 240, 20)]
    plan = plan_of("infinite-paper", snapshot_of([400, 250, 300], views, batches))
    assert not any("needs the room" in decision.chosen for decision in plan.decisions)
