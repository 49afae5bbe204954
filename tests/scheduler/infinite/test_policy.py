"""Instances that plan alone and lend each other room: `infinite`."""

from dataclasses import replace
from functools import partial

import lenders
import pytest
from lenders import held, leased
from simulation import Run, simulate, timed_request
from snapshots import begun, snapshot_of, waiting

from loong.core.events import InstanceLost
from loong.core.placement import KVSegment
from loong.core.plan import IterationPlan, KVMigration
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.tuning import LENT_BLOCK

SLOW_EXCHANGE = WorkCostModel(Coefficients(exchange=1.0))
plan_of = partial(lenders.plan_of, "infinite")


def moves_of(run: Run) -> list[tuple[Snapshot, KVMigration]]:
    return [(snapshot, move) for snapshot, plan in run.plans for move in plan.migrations]


def fragmented() -> list[Request]:
    """Return requests of which two leave the third room on two instances of 4000, but on neither alone."""
    return [timed_request(0, 2000, 200), timed_request(1, 1000, 200), timed_request(2, 2850, 10, 0.1)]


def test_with_room_for_all_it_plans_as_instances_that_lend_nothing() -> None:
    requests = [timed_request(n, 5 + 61 * n % 150, 3 + 7 * n % 40, n * 3e-3) for n in range(40)]
    runs = [simulate(name, [2000] * 3, requests) for name in ("infinite", "vllm-m")]
    batches = [[batch for _, plan in run.plans for batch in plan.batches] for run in runs]
    assert batches[0] == batches[1]


def test_an_instance_borrows_room_for_a_request_that_waits() -> None:
    requests = fragmented()
    run, alone = (simulate(name, [4000, 4000], requests) for name in ("infinite", "vllm-m"))
    assert run.ttft(requests[2]) < alone.ttft(requests[2]) / 2
    moves = moves_of(run)
    assert moves
    for snapshot, move in moves:
        assert len(move.segment.positions) % LENT_BLOCK == 0
        assert snapshot.request[move.segment.owner_id].batch_id is not None  # it decodes meanwhile
        assert move.segment.positions.start == 0
    assert run.stats.num_preemptions == 0


def test_nothing_moves_where_two_instances_would_make_fewer_tokens() -> None:
    requests = fragmented()
    run = simulate("infinite", [4000, 4000], requests, cost_model=SLOW_EXCHANGE)
    assert moves_of(run) == []
    alone = simulate("vllm-m", [4000, 4000], requests, cost_model=SLOW_EXCHANGE)
    assert run.token_times == alone.token_times


@pytest.mark.parametrize(("num_prompt", "shares"), [(300, [(1, 128)]), (480, [(1, 128), (2, 128), (3, 32)])])
def test_room_comes_from_as_many_creditors_as_it_takes(
    num_prompt: int, shares: list[tuple[int, int]]
) -> None:
    residents = [held("r0", (0, 300)), *(held(f"r{i}", (i, 400)) for i in (1, 2, 3))]
    batches = [leased(i, i, view) for i, view in enumerate(residents)]
    moves = plan_of(snapshot_of([600] * 4, [*residents, waiting("w", num_prompt, 20)], batches)).migrations
    assert {(move.segment.owner_id, move.segment.instance_id) for move in moves} == {("r0", 0)}
    assert [(m.destination_id, len(m.segment.positions)) for m in moves] == shares


def test_the_longest_request_lends_out_first() -> None:
    short, long = held("short", (0, 100)), held("long", (0, 250))
    others = [held(f"r{i}", (i, 400)) for i in (1, 2, 3)]
    batches = [leased(0, 0, short, long), *(leased(i, i, view) for i, view in enumerate(others, 1))]
    asking = [waiting("w", 440, 20), waiting("x", 440, 20, arrival_time=1.0)]
    views = [short, long, *others, *asking]
    moves = plan_of(snapshot_of([600] * 4, views, batches)).migrations
    assert [move.segment.owner_id for move in moves] == ["long", "long", "short", "short"]
    assert [len(move.segment.positions) for move in moves] == [128, 112, 16, 80]


@pytest.mark.parametrize(
    ("num_beside", "third_room", "shares"),
    [(1, 300, [(1, 38)]), (71, 460, [(1, 21), (2, 17)]), (92, 300, [])],
)
def test_a_creditor_that_lacks_room_gets_it_back(
    num_beside: int, third_room: int, shares: list[tuple[int, int]]
) -> None:
    """KV of "debtor" on instance 0 goes home, and to another creditor as far as there is no room at home."""
    debtor, own = held("debtor", (0, 110), (1, 40), max_tokens=100), held("own", (0, 10))
    beside, third = held("beside", (1, num_beside)), held("third", (2, 230))
    batches = [leased(0, 0, own), leased(1, 1, debtor, beside), leased(2, 2, third)]
    views = [debtor, own, beside, third, waiting("w", 240, 20)]
    moves = plan_of(snapshot_of([400, 250, third_room], views, batches)).migrations
    assert {(m.segment.owner_id, m.segment.instance_id) for m in moves} <= {("debtor", 0)}
    assert [(m.destination_id, len(m.segment.positions)) for m in moves] == shares


def test_nothing_moves_into_the_room_that_a_long_request_needs() -> None:
    long, own = held("long", (0, 100), max_tokens=551), held("own", (1, 200))
    batches = [leased(0, 0, long), leased(1, 1, own)]
    snapshot = snapshot_of([400, 500], [long, own, waiting("w", 150, 20)], batches)
    assert plan_of(snapshot).migrations == ()


def test_kv_that_is_at_rest_or_moves_already_stays() -> None:
    debtor, own = held("debtor", (0, 110), (1, 40)), held("own", (0, 10))
    asking = waiting("w", 240, 20)
    at_rest = snapshot_of([400, 250], [debtor, own, asking], [leased(0, 0, own)])
    assert plan_of(at_rest).migrations == ()
    moving = replace(debtor, is_migrating=True)
    assert plan_of(snapshot_of([400, 250], [moving, own, asking], [leased(0, 0, own)])).migrations == ()


def test_a_prompt_waits_for_slots_from_which_kv_is_still_moving() -> None:
    view = replace(held("r", (0, 200)), is_migrating=True)
    snapshot = snapshot_of([400, 400], [view, waiting("w", 230, 20)])
    first, second = snapshot.instances
    move = KVMigration(KVSegment("r", range(150), 0), 1)
    plan = plan_of(replace(snapshot, instances=(first, second.using(150)), migrations=(move,)))
    assert plan == IterationPlan()


def test_a_step_has_no_more_prompts_than_fit_its_budget() -> None:
    requests = [timed_request(n, 10, 2) for n in range(2)]
    run = simulate("infinite", [100], requests, config=PolicyConfig(max_num_batched_tokens=16))
    first, second, *_ = [batch for _, plan in run.plans for batch in plan.batches]
    assert (first.request_ids, second.request_ids) == (("r000",), ("r001",))


def test_a_lease_ends_once_kv_of_its_requests_has_moved() -> None:
    view = held("r", (0, 100))
    snapshot = snapshot_of([400, 400], [view], [leased(0, 0, view)])
    assert plan_of(snapshot).lease_ends == ()
    (leasing,) = snapshot.running
    moved = replace(snapshot, running=(replace(leasing, is_migrating=True),))
    assert [end.batch_id for end in plan_of(moved).lease_ends] == [0]


def test_decodes_wait_for_one_whose_kv_moves_where_all_together_just_fit() -> None:
    views = [held("a", (0, 40), max_tokens=60), replace(held("b", (0, 40), max_tokens=30), is_migrating=True)]
    assert plan_of(snapshot_of([140, 10], views)).batches == ()
    (batch,) = plan_of(snapshot_of([400, 10], views)).batches
    assert batch.request_ids == ("a",)


def test_a_long_prompt_is_computed_at_one_home_that_pushes_its_oldest_kv() -> None:
    (request,) = requests = [timed_request(0, 250, 20)]
    run = simulate("infinite", [100, 100, 100], requests)
    batches = [batch for _, plan in run.plans for batch in plan.batches]
    assert {batch.group.instance_ids for batch in batches} == {batches[0].group.instance_ids}
    pushed = [push.segment.positions for batch in batches for push in batch.pushes]
    assert sum(map(len, pushed)) >= 250 + 19 - 100
    assert pushed[0].start == 0
    assert len(run.tokens[request.request_id]) == 20
    assert run.stats.num_migrated_tokens == 0


def test_an_output_that_outgrows_its_home_goes_on_where_there_is_room() -> None:
    run = simulate("infinite", [30, 30, 30], [timed_request(0, 1, 90)])
    assert len(run.tokens["r000"]) == 90
    assert len({batch.group.instance_ids for _, plan in run.plans for batch in plan.batches}) == 3


def test_no_later_request_begins_before_a_long_one_that_waits_for_room() -> None:
    requests = [timed_request(0, 150, 50), timed_request(1, 350, 20, 0.05), timed_request(2, 20, 20, 0.06)]
    run = simulate("infinite", [200, 200], requests)
    assert run.token_times["r001"][0] >= run.token_times["r000"][-1]
    assert run.token_times["r002"][0] >= run.token_times["r001"][0]


def test_a_request_begins_only_beside_a_long_one_that_keeps_its_room() -> None:
    requests = [timed_request(0, 350, 30), timed_request(1, 60, 20, 0.01)]
    run = simulate("infinite", [200, 200], requests)
    assert run.token_times["r001"][0] >= run.token_times["r000"][-1]
    run = simulate("infinite", [230, 230], requests)
    assert run.token_times["r001"][0] < run.token_times["r000"][-1]


def test_requests_that_lack_room_after_a_loss_go_one_after_the_other() -> None:
    requests = [timed_request(n, 130, 60) for n in range(2)]
    run = simulate("infinite", [100, 200, 100], requests, incidents=[InstanceLost(0.08, 2)])
    assert {r: len(tokens) for r, tokens in run.tokens.items()} == {"r000": 60, "r001": 60}


def test_if_nothing_can_go_on_the_last_to_come_is_computed_again() -> None:
    views = [held("a", (0, 50), max_tokens=20), held("b", (0, 50), max_tokens=20)]
    views[1] = replace(views[1], arrival_time=1.0)
    assert [p.request_id for p in plan_of(snapshot_of([100], views)).preemptions] == ["b"]


def test_a_prompt_for_which_there_is_no_slot_is_computed_again_if_it_came_last() -> None:
    views = [held("a", (0, 50), max_tokens=20), replace(begun("b", 60, 50, (0,)), arrival_time=1.0)]
    plan = plan_of(snapshot_of([100], views))
    assert plan.batches == ()
    assert [preemption.request_id for preemption in plan.preemptions] == ["b"]


def test_a_request_that_waits_for_a_large_pool_holds_up_none_that_fits_a_small_one() -> None:
    requests = [timed_request(0, 150, 40), timed_request(1, 150, 40, 0.01), timed_request(2, 10, 5, 0.02)]
    requests.append(timed_request(3, 140, 5, 0.02))
    run = simulate("infinite", [50, 200], requests)
    assert run.token_times["r002"][-1] < run.token_times["r000"][-1] < run.token_times["r001"][0]
    assert run.token_times["r001"][0] < run.token_times["r003"][0]
