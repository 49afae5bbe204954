"""The planning view: every instance in one instance set, whole sets, and room that is really there."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import decode
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import KVSegment, Placement
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.planning_view import InstanceSet, PlanningView, make_planning_view


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draw groups in flight, and requests not in flight anywhere, on up to eight instances."""
    num_instances = draw(st.integers(1, 8))
    ids = st.lists(st.integers(0, num_instances - 1), min_size=1, max_size=3, unique=True).map(tuple)
    views: list[RequestView] = []
    batches: list[RunningBatch] = []
    for group in draw(st.lists(ids, max_size=4, unique_by=lambda group: group[0])):
        if not any(set(group) & set(batch.plan.group.instance_ids) for batch in batches):
            view = decoding(f"b{len(batches)}", 9, group)
            plan = decode([view], group, {view.request_id: group[0]}, num_steps=draw(st.sampled_from([1, 8])))
            batches.append(running(len(batches), replace(plan, predicted_time=draw(st.floats(0, 1)))))
            views.append(view)
    for number, held in enumerate(draw(st.lists(ids, max_size=6))):
        kind = draw(st.sampled_from(["decode", "prefill", "wait"]))
        name = f"{kind}{number}"
        if kind == "decode":
            views.append(decoding(name, 9, held))
        else:
            views.append(begun(name, 20, 9, held) if kind == "prefill" else waiting(name, 9))
    return snapshot_of([1000] * num_instances, views, batches, now=draw(st.floats(0, 2)))


def unit_with(found: PlanningView, instance_id: int) -> InstanceSet:
    return next(
        instance_set for instance_set in found.instance_sets if instance_id in instance_set.instance_ids
    )


@given(snapshots())
def test_units_partition_the_full_instances(snapshot: Snapshot) -> None:
    found = make_planning_view(snapshot)
    members = [i for instance_set in found.instance_sets for i in instance_set.instance_ids]
    assert sorted(members) == sorted(i.instance_id for i in snapshot.instances)
    assert found.num_instances == len(snapshot.instances)


@given(snapshots())
def test_a_unit_is_ready_if_and_only_if_all_its_instances_are_idle(snapshot: Snapshot) -> None:
    for instance_set in make_planning_view(snapshot).instance_sets:
        assert instance_set.is_ready == all(snapshot.instance[i].is_idle for i in instance_set.instance_ids)
        assert not (instance_set.is_ready and instance_set.is_in_lease)


@given(snapshots())
def test_what_rests_is_in_the_one_unit_that_holds_it_and_units_are_no_larger_than_they_must_be(
    snapshot: Snapshot,
) -> None:
    found = make_planning_view(snapshot)
    for view in snapshot.running:
        instance_sets = [
            instance_set
            for instance_set in found.instance_sets
            if view in instance_set.decodes or view in instance_set.prefills
        ]
        assert len(instance_sets) == (1 if view.is_plannable else 0)
        for instance_set in instance_sets:
            assert set(view.placement.instance_ids) <= set(instance_set.instance_ids)
            assert (view in instance_set.decodes) == view.is_decoding
    links = [set(view.placement.instance_ids) for view in snapshot.running if view.is_plannable]
    links += [set(batch.plan.group.instance_ids) for batch in snapshot.batches]
    for instance_set in found.instance_sets:
        for size in range(1, len(instance_set.instance_ids)):
            for part in map(set, combinations(instance_set.instance_ids, size)):
                assert any(link & part and link - part for link in links), "it could be two instance sets"


def test_a_set_is_in_a_lease_if_all_its_batches_can_end_at_a_step() -> None:
    a, b = decoding("a", 9, (0,)), decoding("b", 9, (1,))
    lease, step = decode([a], (0,), {"a": 0}, num_steps=8), decode([b], (1,), {"b": 1})
    batches, both = [running(0, lease), running(1, step)], decoding("both", 9, (0, 1))
    (instance_set,) = make_planning_view(snapshot_of([99, 99], [a, b, both], batches)).instance_sets
    assert not instance_set.is_in_lease
    apart = make_planning_view(snapshot_of([99, 99], [a, b], batches))
    assert [instance_set.is_in_lease for instance_set in apart.instance_sets] == [True, False]


def test_kv_of_requests_that_have_ended_counts_as_free_once_their_batch_runs_no_more() -> None:
    going, ended = decoding("going", 20, (0,)), decoding("ended", 30, (0, 1), max_tokens=9)
    plan = decode([going, ended], (0, 1), {"going": 0, "ended": 1}, num_steps=8)
    snapshot = snapshot_of([100, 100], [going, ended], [running(0, plan)])
    assert dict(make_planning_view(snapshot).free) == {0: 100 - 20 - 8 - 15, 1: 100 - 15 - 8}
    running_views = tuple(replace(view, has_ended=view.request_id == "ended") for view in snapshot.running)
    ending = replace(snapshot, running=running_views)
    assert dict(make_planning_view(ending).free) == {0: 100 - 20 - 8, 1: 100}


def with_tiers(snapshot: Snapshot) -> Snapshot:
    """With a host tier, 8, and an instance that only attends, 9."""
    host = ElasticInstance(8, 1, InstanceKind.HOST, 1000)
    attending = ElasticInstance(9, 1, InstanceKind.ATTENTION, 1000)
    return replace(snapshot, instances=(*snapshot.instances, host, attending))


@pytest.mark.parametrize(("elsewhere", "is_left_alone"), [(8, True), (9, False)])
def test_requests_with_kv_on_a_host_tier_are_left_alone_but_memory_instances_serve(
    elsewhere: int, is_left_alone: bool
) -> None:
    segments = (KVSegment("away", range(5), 0), KVSegment("away", range(5, 9), elsewhere))
    away = RequestView("away", 9, 1, 16, 0.0, None, Placement(segments))
    here = decoding("here", 9, (0, 1))
    found = make_planning_view(with_tiers(snapshot_of([99, 99], [away, here])))
    assert dict(found.free).keys() == {0, 1}
    decodes = [here] if is_left_alone else [away, here]
    assert [instance_set.decodes for instance_set in found.instance_sets] == [decodes]
    assert found.capacity == 99 + 99 + 1000


def test_a_batch_may_have_instances_that_are_not_surveyed() -> None:
    view = decoding("r", 9, (0, 9))
    plan = decode([view], (0, 9), {"r": 0})
    found = make_planning_view(with_tiers(snapshot_of([99], [view], [running(0, plan)])))
    assert [(instance_set.instance_ids, instance_set.is_ready) for instance_set in found.instance_sets] == [
        ((0,), False)
    ]
    moved = decoding("r", 9, (9,))
    alone = decode([moved], (9,), {"r": 9})
    found = make_planning_view(with_tiers(snapshot_of([99], [moved], [running(0, alone)])))
    assert [instance_set.is_ready for instance_set in found.instance_sets] == [True]


def test_who_waits_is_not_tied_to_any_unit_and_who_moves_or_has_ended_is_not_planned() -> None:
    views = [waiting("a", 9), waiting("b", 9), decoding("c", 9, (0,))]
    snapshot = snapshot_of([99], views)
    assert [view.request_id for view in make_planning_view(snapshot).waiting] == ["a", "b"]
    moving = replace(snapshot.running[0], is_migrating=True)
    ended = replace(snapshot.waiting[0], has_ended=True)
    found = make_planning_view(replace(snapshot, running=(moving,), waiting=(ended, snapshot.waiting[1])))
    assert [view.request_id for view in found.waiting] == ["b"]
    assert found.instance_sets[0].decodes == []


def test_what_an_ended_request_leaves_elsewhere_is_no_room_for_plans() -> None:
    view = decoding("r", 10, (0, 9))
    plan = decode([view], (0, 9), {"r": 0})
    snapshot = with_tiers(snapshot_of([99], [view], [running(0, plan)]))
    ended = replace(snapshot.running[0], has_ended=True)
    assert dict(make_planning_view(replace(snapshot, running=(ended,))).free) == {0: 99}


def test_an_instance_whose_batch_is_ending_can_be_planned_for() -> None:
    view = decoding("r", 9, (0,))
    ending = running(1, replace(decode([view], (0, 2), {"r": 0}), predicted_time=0.5), started_at=1.0)
    snapshot = replace(snapshot_of([1000] * 3, [view], now=1.2), ending=(ending,))
    found = make_planning_view(snapshot)
    assert {instance_set.instance_ids for instance_set in found.instance_sets} == {(0,), (1,), (2,)}
    assert all(instance_set.is_ready for instance_set in found.instance_sets)


def test_idle_instances_are_in_the_order_of_hosts_then_of_most_room() -> None:
    snapshot = snapshot_of([100, 300, 200, 400])
    assert make_planning_view(snapshot).idle == (3, 1, 2, 0)
    spread = tuple(replace(i, host_id=i.instance_id // 2) for i in snapshot.instances)
    assert make_planning_view(replace(snapshot, instances=spread)).idle == (1, 0, 3, 2)
