"""The published policy, decision by decision, each on a cluster made for it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from machines import CPU
from plans import decode
from snapshots import decoding, running, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, Preemption, PreemptionReason
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.policy import make_policy


def planned(snapshot: Snapshot, cost_model: CostModel = CPU) -> IterationPlan:
    plan = make_policy("esp-paper", PolicyConfig())(snapshot, cost_model)
    check_plan(snapshot, plan)
    return plan


def chat(
    request_id: str,
    *instance_ids: InstanceId,
    num_prompt: int = 20,
    max_tokens: int = 100,
    arrival_time: float = 0.0,
) -> RequestView:
    """Return a request that has just begun to decode."""
    view = decoding(request_id, num_prompt, instance_ids, max_tokens)
    return replace(view, arrival_time=arrival_time, first_token_time=arrival_time)


def groups(plan: IterationPlan) -> dict[tuple[InstanceId, ...], tuple[str, ...]]:
    return {batch.group.instance_ids: batch.request_ids for batch in plan.batches}


def leased(views: Sequence[RequestView], instance_id: InstanceId, num_steps: int = 16) -> BatchPlan:
    return decode(views, [instance_id], {v.request_id: instance_id for v in views}, num_steps=num_steps)


def test_a_lone_long_prompt_runs_everywhere_and_its_kv_stays_where_it_just_fits() -> None:
    for capacity, num_keepers in ((5000, 1), (2500, 2), (1000, 4)):
        (batch,) = planned(snapshot_of([capacity] * 4, [waiting("long", 4000, 1)])).batches
        assert batch.group.instance_ids == (0, 1, 2, 3)
        assert len(batch.num_stored_tokens) == num_keepers


def test_short_prompts_are_batched_by_the_program_an_instance_each_while_there_are_some() -> None:
    plan = planned(snapshot_of([500] * 4, [waiting(f"r{n}", 40 + n) for n in range(4)]))
    assert sorted(groups(plan)) == [(0,), (1,), (2,), (3,)]
    (batch,) = planned(snapshot_of([500], [waiting(f"r{n}", 40 + n) for n in range(4)])).batches
    assert batch.request_ids == ("r3", "r2", "r1", "r0")


def test_the_program_takes_instances_in_the_order_of_hosts_then_of_free_slots() -> None:
    snapshot = snapshot_of([500, 700, 500, 700], [waiting(f"r{n}", 130 + n, 1) for n in range(2)])
    assert sorted(groups(planned(snapshot))) == [(0, 2), (1, 3)]
    spread = tuple(replace(i, host_id=i.instance_id // 2) for i in snapshot.instances)
    assert sorted(groups(planned(replace(snapshot, instances=spread)))) == [(0, 1), (2, 3)]


def test_prompts_are_taken_in_order_until_computing_binds_them() -> None:
    (batch,) = planned(snapshot_of([9000], [waiting(f"r{n}", 90) for n in range(9)])).batches
    assert batch.request_ids == ("r0", "r1", "r2")  # a step takes 4 ms, and 1.8 ms more for each


def test_no_prompt_enters_whose_kv_would_come_to_evict_somebody() -> None:
    snapshot = snapshot_of([100, 100], [chat("a", 0, num_prompt=50, max_tokens=81), waiting("b", 50, 81)])
    assert groups(planned(snapshot)) == {(0,): ("a",)}
    snapshot = snapshot_of([100, 100], [chat("a", 0, num_prompt=50, max_tokens=51), waiting("b", 50, 51)])
    assert groups(planned(snapshot)) == {(0,): ("a",), (1,): ("b",)}


def test_a_batch_with_long_to_decode_stops_for_a_short_prompt() -> None:
    views = [chat("a", 0), waiting("b", 50)]
    assert groups(planned(snapshot_of([500], views, now=0.01))) == {(0,): ("b",)}


def test_a_batch_that_has_decoded_long_does_not_stop() -> None:
    views = [chat("a", 0), waiting("b", 50)]
    assert groups(planned(snapshot_of([500], views, now=10.0))) == {(0,): ("a",)}


def test_a_batch_does_not_stop_for_a_prompt_that_takes_longer_than_it_saves() -> None:
    views = [chat("a", 0), waiting("b", 9000)]
    assert groups(planned(snapshot_of([9999], views, now=0.01))) == {(0,): ("a",)}


def test_a_lease_ends_where_its_batch_is_to_stop() -> None:
    first = chat("a", 0)
    lease = running(3, leased([first], 0), num_steps_taken=4)
    plan = planned(snapshot_of([500], [first, waiting("b", 50)], [lease], now=0.01))
    assert plan == IterationPlan(lease_ends=(LeaseEnd(3, 5),), program_sizes=(1,))


def test_a_long_prompt_gets_the_instances_whose_kv_has_room_elsewhere() -> None:
    views = [chat("a", 0, num_prompt=30), chat("b", 1), chat("c", 2, num_prompt=25), waiting("d", 4000)]
    plan = planned(snapshot_of([9000] * 3, views, now=0.01))
    assert plan.migrations == tuple(KVMigration(v.placement.segments[0], 2) for v in (views[1], views[0]))
    assert groups(plan) == {(2,): ("c",)}


def test_kv_stays_where_moving_it_takes_longer_than_it_saves() -> None:
    views = [chat("a", 0), chat("b", 1, num_prompt=2000), waiting("c", 4000)]
    assert planned(snapshot_of([9000] * 3, views, now=0.01)).migrations
    slow_link = WorkCostModel(Coefficients(moved_key=1.0))
    plan = planned(snapshot_of([9000] * 3, views, now=0.01), slow_link)
    assert groups(plan) == {(0,): ("a",), (1,): ("b",), (2,): ("c",)}


def test_an_instance_that_a_batch_takes_for_slots_is_not_taken_from_it_as_empty() -> None:
    slow_link = WorkCostModel(Coefficients(moved_key=1.0))
    views = [chat("a", 0), waiting("b", 4000)]
    plan = planned(snapshot_of([20, 9000, 9000], views, now=10.0), slow_link)
    assert groups(plan) == {(0, 1): ("a",), (2,): ("b",)}


def test_an_instance_that_a_lease_only_writes_to_costs_no_more_than_the_end_of_the_lease() -> None:
    slow_link = WorkCostModel(Coefficients(moved_key=1.0))
    first = chat("a", 0)
    lease = running(3, decode([first], [0, 1], {"a": 1}, num_steps=16), num_steps_taken=4)
    plan = planned(snapshot_of([20, 9000, 9000], [first, waiting("b", 4000)], [lease], now=10.0), slow_link)
    assert plan == IterationPlan(lease_ends=(LeaseEnd(3, 5),), program_sizes=(1,))


def test_who_has_no_slot_left_where_others_kv_moves_from_waits_until_it_has() -> None:
    tying, full, roomy = chat("a", 0, 1, num_prompt=40), chat("b", 1), chat("c", 2)
    views = [tying, full, roomy, waiting("d", 8000)]
    plan = planned(snapshot_of([9000, 40, 75, 9000], views, now=10.0))
    assert plan.migrations == (KVMigration(tying.placement.segments[0], 2),)
    assert groups(plan) == {(2,): ("c",)}
    assert tying.placement.segments[0].instance_id == 0


def test_prompts_wait_for_an_instance_that_is_still_being_emptied() -> None:
    staying, leaving = chat("a", 0), chat("b", 1)
    move = KVMigration(leaving.placement.segments[0], 0)
    snapshot = snapshot_of([9000] * 2, [staying, replace(leaving, is_migrating=True), waiting("c", 4000)])
    plan = planned(replace(snapshot, migrations=(move,), now=0.01))
    assert groups(plan) == {(0,): ("a",)}


def test_a_batch_without_slots_takes_an_idle_instance_and_moves_nothing() -> None:
    plan = planned(snapshot_of([20, 50], [chat("a", 0, max_tokens=40)]))
    assert groups(plan) == {(0, 1): ("a",)}
    assert plan.batches[0].num_stored_tokens == {1: 16}


def test_a_batch_without_slots_merges_with_one_that_has_some_to_spare() -> None:
    views = [chat("a", 0, max_tokens=8), chat("b", 1, max_tokens=8), chat("c", 2, max_tokens=8)]
    assert groups(planned(snapshot_of([20, 30, 90], views))) == {(1,): ("b",), (0, 2): ("a", "c")}


def test_without_slots_anywhere_leases_end_no_prompt_begins_and_then_the_latest_is_preempted() -> None:
    first, second = chat("a", 0, max_tokens=9), chat("b", 1, max_tokens=9, arrival_time=1.0)
    lease = running(1, leased([second], 1, num_steps=4))
    snapshot = snapshot_of([20, 24], [first, second, waiting("c", 1, 1)], [lease], now=2.0)
    assert planned(snapshot) == IterationPlan(lease_ends=(LeaseEnd(1, 1),))
    at_rest = snapshot_of([20, 20], [first, second, waiting("c", 1, 1)], now=2.0)
    assert planned(at_rest) == IterationPlan(preemptions=(Preemption("b"),))


def test_a_batch_that_computing_binds_gets_instances_and_spreads_its_masters_evenly() -> None:
    bound_by_two = WorkCostModel(Coefficients(step=4e-3, token=2e-3))
    views = [chat(f"r{n}", 0) for n in range(6)]
    (batch,) = planned(snapshot_of([900] * 4, views), bound_by_two).batches
    assert batch.group.instance_ids == (0, 1, 2)
    assert Counter(block.master_id for block in batch.queries) == {0: 2, 1: 2, 2: 2}
    (batch,) = planned(snapshot_of([900] * 4, views)).batches
    assert batch.group.instance_ids == (0,)


def test_every_batch_says_how_long_a_step_is_to_take() -> None:
    plan = planned(snapshot_of([900] * 2, [chat("a", 0), waiting("b", 50)]))
    assert len(plan.batches) == 2
    assert all(batch.predicted_time is not None for batch in plan.batches)


def hurt(
    request_id: str, num_prompt: int, *instance_ids: InstanceId, arrival_time: float = 0.0
) -> RequestView:
    """Return a request that has lost the KV on the last of these instances, which is not there."""
    view = chat(request_id, *instance_ids, num_prompt=num_prompt, arrival_time=arrival_time)
    return replace(view, placement=view.placement.without(instance_ids[-1]))


def test_lost_kv_is_computed_where_the_other_kv_is_before_all_others_there() -> None:
    plan = planned(snapshot_of([1000] * 3, [hurt("hurt", 60, 0, 1, 9), chat("chat", 1), chat("other", 2)]))
    assert groups(plan) == {(0, 1): ("hurt",), (2,): ("other",)}
    (repair,) = [batch for batch in plan.batches if batch.num_steps == 1]
    assert sorted(p for block in repair.queries for p in block.positions) == [*range(2, 60, 3), 60]


def test_lost_kv_takes_idle_instances_where_slots_lack() -> None:
    plan = planned(snapshot_of([25, 25, 1000, 900], [hurt("hurt", 60, 0, 1, 9)]))
    assert groups(plan) == {(0, 1, 2): ("hurt",)}


def test_the_latest_arrival_gives_way_to_lost_kv() -> None:
    late = chat("late", 1, num_prompt=30, max_tokens=2, arrival_time=1.0)
    plan = planned(snapshot_of([25, 55], [replace(hurt("hurt", 60, 0, 1, 9), max_tokens=2), late]))
    assert plan.preemptions == (Preemption("late", PreemptionReason.REPAIR),)
    assert not plan.batches


def test_a_request_whose_lost_kv_does_not_fit_where_it_is_begins_anew() -> None:
    busy = chat("busy", 2)
    batch = running(7, leased([busy], 2))
    plan = planned(snapshot_of([25, 25, 1000], [hurt("hurt", 60, 0, 1, 9), busy], [batch]))
    assert plan.preemptions == (Preemption("hurt", PreemptionReason.REPAIR),)
    assert not plan.batches
