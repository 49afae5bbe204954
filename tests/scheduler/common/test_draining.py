"""Draining instances are emptied, and hidden from the policy with the requests that have a part in them."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from machines import CPU
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.check_plan import check_plan
from loong.core.decision import DecisionKind
from loong.core.instance import ESPGroup, Service
from loong.core.placement import InstanceId, KVSegment, striped, tokens_by_instance
from loong.core.plan import BatchPlan, Eviction, IterationPlan, KVMigration, LeaseEnd, QueryBlock, Transfer
from loong.core.positions import is_partition
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cluster_parts import Parts
from loong.scheduler.common.draining import Draining
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

POOL = 100


def draining(snapshot: Snapshot, *instance_ids: InstanceId) -> Snapshot:
    """Return the snapshot in which these instances drain."""
    instances = (replace(i, is_draining=i.instance_id in instance_ids) for i in snapshot.instances)
    return replace(snapshot, instances=tuple(instances))


def of(snapshot: Snapshot) -> Draining:
    """Return what drains."""
    found = Draining.of(snapshot)
    assert found is not None
    return found


def lease(view: RequestView, instance_ids: tuple[InstanceId, ...], num_steps: int = 8) -> BatchPlan:
    """Return a lease of a decode, whose master is the first of a group."""
    master_id, newest = instance_ids[0], view.num_computed_tokens
    block = QueryBlock(view.request_id, range(newest, newest + 1), master_id, Transfer.QUERY)
    writes = (KVSegment(view.request_id, range(newest, newest + num_steps), master_id),)
    return BatchPlan(ESPGroup(instance_ids), (block,), writes, num_steps, predicted_time=0.01)


def planned(snapshot: Snapshot, parts: Parts | None = None) -> IterationPlan:
    """Return the plan that empties the draining instances, which keeps the rules.

    KV of a request may be on all others, or stays within one of `parts`. All of it on draining instances that
    nothing in flight touches either moves or is evicted.
    """
    plan = of(snapshot).plan((tuple(snapshot.pools),) if parts is None else parts)
    check_plan(snapshot, plan)
    gone = [m.segment for m in plan.migrations] + [eviction.segment for eviction in plan.evictions]
    for view in snapshot.running if not (snapshot.batches or snapshot.ending or snapshot.migrations) else ():
        for instance_id in snapshot.draining_ids:
            own = [s.positions for s in gone if s[::2] == (view.request_id, instance_id)]
            assert is_partition(own, *view.placement.on(instance_id))
    return plan


def ids(views: Iterable[RequestView]) -> set[str]:
    return {view.request_id for view in views}


def test_nothing_drains_where_no_instance_is_to_leave() -> None:
    assert Draining.of(snapshot_of([POOL], [decoding("a", 10, (0,))])) is None


def test_kv_moves_to_one_instance_with_room_until_the_end_and_some_of_the_kv() -> None:
    views = [decoding("a", 30, (1, 2), max_tokens=20), decoding("b", 40, (0,), max_tokens=2)]
    plan = planned(draining(snapshot_of([POOL] * 3, views), 2))
    on_draining = striped("a", range(30), (1, 2)).segments[1]
    assert plan.migrations == (KVMigration(on_draining, 1),)
    assert (plan.evictions, plan.lease_ends) == ((), ())
    (decision,) = plan.decisions
    assert (decision.kind, decision.request_ids) == (DecisionKind.MIGRATE, ("a",))


def test_kv_moves_to_several_instances_where_none_has_room_for_all_of_it() -> None:
    views = [decoding("a", 120, (2, 3)), decoding("b", 40, (0,), max_tokens=11)]  # b needs 50
    plan = planned(draining(snapshot_of([POOL] * 4, views), 2, 3))
    moved = tokens_by_instance(migration.arriving for migration in plan.migrations)
    assert (moved, plan.evictions) == ({1: POOL, 0: 20}, ())


def test_only_kv_that_finds_no_room_is_evicted() -> None:
    growing = decoding("growing", 40, (0,), max_tokens=50)  # leaves 11 of 60 free slots
    striped_one = decoding("a", 30, (0, 1), max_tokens=2)  # 15 of its tokens are on instance 0
    plan = planned(draining(snapshot_of([POOL + 10] * 2, [growing, striped_one]), 1))
    assert sum(len(migration.segment.positions) for migration in plan.migrations) == 6
    assert plan.evictions == (Eviction(KVSegment("a", range(13, 30, 2), 1)),)
    kinds = [(decision.kind, decision.request_ids) for decision in plan.decisions]
    assert kinds == [(DecisionKind.MIGRATE, ("a",)), (DecisionKind.EVICT, ("a",))]
    assert plan.decisions[1].chosen == "instance 1 is to leave, and no other has room for 9 tokens of its KV"


def test_the_oldest_requests_with_output_move_first() -> None:
    views = [begun("new", 60, 50, (1,)), *(decoding(name, 50, (1,), max_tokens=11) for name in "ba")]
    views = [replace(view, arrival_time=float(i)) for i, view in enumerate(views)]
    plan = planned(draining(snapshot_of([POOL, 150], views), 1))
    moved = {m.segment.owner_id: len(m.segment.positions) for m in plan.migrations}
    assert moved == {"b": 50}
    evicted = {e.segment.owner_id: len(e.segment.positions) for e in plan.evictions}
    assert evicted == {"a": 50, "new": 50}, "40 slots are left, and an instance alone has all KV or none"


def test_kv_stays_within_one_part_of_the_cluster() -> None:
    apart, striped_one = decoding("apart", 150, (3,)), decoding("a", 20, (0, 3), max_tokens=2)
    snapshot = draining(snapshot_of([POOL, POOL, 2 * POOL, 170], [apart, striped_one]), 3)
    plan = planned(snapshot, parts=((0, 1), (2,)))
    moved = {(m.segment.owner_id, m.destination_id): len(m.segment.positions) for m in plan.migrations}
    assert moved == {("apart", 2): 150, ("a", 0): 10}


def test_leases_with_a_draining_member_or_holder_end_and_their_requests_wait_for_that() -> None:
    a, b, c = decoding("a", 10, (1,)), decoding("b", 10, (0, 2)), decoding("c", 10, (0,))
    batches = [running(1, lease(a, (1, 0)), num_steps_taken=3), running(2, lease(b, (3,)))]
    batches[1] = replace(batches[1], holder_ids=(0, 2))
    snapshot = draining(snapshot_of([POOL] * 4, [a, b, c], batches), 1, 2)
    plan = planned(snapshot)
    assert plan.lease_ends == (LeaseEnd(1, 4), LeaseEnd(2, 1))
    assert {decision.kind for decision in plan.decisions} == {DecisionKind.END_LEASE}
    assert [decision.chosen for decision in plan.decisions] == [
        "instance 1 is to leave",
        "instance 2 is to leave",
    ]
    assert (plan.migrations, plan.evictions) == ((), ())
    hidden = of(snapshot).hidden(plan)
    assert ids(hidden.running) == {"c"}
    assert [i.instance_id for i in hidden.instances] == [0, 3]
    shown = hidden.batch[1], hidden.batch[2]
    assert [batch.plan.group.instance_ids for batch in shown] == [(0,), (3,)]
    assert not any(b.plan.request_ids or b.can_end_early or b.is_extendable or b.holder_ids for b in shown)


def test_reasons_name_all_instances_that_are_to_leave() -> None:
    a = decoding("a", 250, (1, 2))
    plan = planned(draining(snapshot_of([POOL, 125, 125], [a]), 1, 2))
    assert tokens_by_instance(eviction.segment for eviction in plan.evictions) == {1: 125, 2: 125}
    assert plan.decisions[0].chosen.startswith("instances 1 and 2 are to leave, and no other")


def test_a_batch_on_draining_instances_alone_is_hidden() -> None:
    a, c = decoding("a", 10, (1,)), decoding("c", 10, (0,))
    batches = [running(1, lease(a, (1,))), running(2, lease(c, (0,)))]
    snapshot = draining(snapshot_of([POOL] * 2, [a, c, waiting("w", 5)], batches), 1)
    hidden = of(snapshot).hidden(planned(snapshot))
    assert (hidden.batches, ids(hidden.running), ids(hidden.waiting)) == ((batches[1],), {"c"}, {"w"})


def test_requests_of_a_batch_that_is_ending_wait_for_its_end() -> None:
    a = decoding("a", 10, (1,))
    ending = replace(running(1, lease(a, (1, 0), num_steps=1)), num_steps_taken=1)
    snapshot = replace(draining(snapshot_of([POOL] * 2, [a]), 1), ending=(ending,), leaving={0: 3, 1: 4})
    plan = planned(snapshot)
    assert plan == IterationPlan()
    hidden = of(snapshot).hidden(plan)
    assert (hidden.running, dict(hidden.leaving), len(hidden.ending)) == ((), {0: 3}, 1)


def test_slots_of_hidden_requests_are_hidden_with_those_that_they_may_still_need() -> None:
    a, b = decoding("a", 20, (0, 1), max_tokens=6), decoding("b", 10, (0,))
    snapshot = draining(snapshot_of([POOL] * 2, [a, b]), 1)
    plan = planned(snapshot)
    assert sum(len(migration.segment.positions) for migration in plan.migrations) == 10
    (instance,) = of(snapshot).hidden(plan).instances
    assert (instance.kv_used, instance.kv_free) == (10, POOL - 20 - 10 - 5)


def test_moves_in_flight_keep_their_room_and_their_requests_are_hidden() -> None:
    leaving, coming = decoding("leaving", 10, (1,), max_tokens=31), decoding("coming", 10, (0,), max_tokens=3)
    others = decoding("d", 5, (2,)), begun("c", 9, 3, (0,))
    views = [replace(view, is_migrating=True) for view in (leaving, coming, others[0])] + [others[1]]
    snapshot = draining(snapshot_of([POOL] * 3, views), 1)
    moved = (("leaving", 10, 1, 0), ("coming", 10, 0, 1), ("d", 5, 2, 0))
    moves = [KVMigration(KVSegment(name, range(n), source), to) for name, n, source, to in moved]
    used = (28, 20, 5)
    instances = tuple(i.using(n) for i, n in zip(snapshot.instances, used, strict=True))
    snapshot = replace(snapshot, migrations=tuple(moves), instances=instances)
    plan = planned(snapshot)
    assert plan == IterationPlan()
    hidden = of(snapshot).hidden(plan)
    assert (ids(hidden.running), hidden.migrations) == ({"c", "d"}, (moves[2],))
    instance = hidden.instance[0]
    assert (instance.kv_used, instance.kv_free) == (3 + 5, POOL - 28 - 30 - 2)


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_prompt_in_its_first_batch_counts_where_it_is_made(has_ended: bool) -> None:
    prompt = replace(waiting("new", 60, max_tokens=30), has_ended=has_ended)
    chunk = BatchPlan(
        ESPGroup((0,)),
        (QueryBlock("new", range(8), 0, Transfer.KV),),
        (KVSegment("new", range(8), 0),),
    )
    snapshot = snapshot_of([POOL] * 2, [decoding("a", 9, (1,), max_tokens=9)])
    batch = running(1, chunk)
    instances = (snapshot.instances[0].using(8).running(1), snapshot.instances[1])
    views = (*snapshot.running, replace(prompt, batch_id=1))
    snapshot = draining(replace(snapshot, batches=(batch,), instances=instances, running=views), 1)
    plan = planned(snapshot)
    assert (not plan.evictions) == has_ended  # it needs 89 of 92 free slots, unless it has ended


def test_what_serves_all_its_leases_for_a_draining_instance_serves_no_other_meanwhile() -> None:
    served, resting = decoding("served", 20, (0, 1)), decoding("resting", 20, (0, 1))
    batch = replace(running(7, lease(served, (3,))), holder_ids=(0, 1))
    snapshot = draining(snapshot_of([POOL] * 4, [served, resting], [batch]), 3)
    snapshot = replace(
        snapshot,
        instances=tuple(replace(i, serves=Service.OWN_HOST, max_served_leases=1) for i in snapshot.instances),
    )
    plan = make_policy("esp", PolicyConfig(target_tpot=0.009))(snapshot, CPU)
    check_plan(snapshot, plan)
    assert [batch.request_ids for batch in plan.batches] == [("resting",)]
    assert set(plan.batches[0].group.instance_ids) >= {0, 1}
