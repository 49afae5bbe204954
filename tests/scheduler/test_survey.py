"""What a policy can plan with: every instance in one unit, whole units, and room that is really there."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import decode, prefill
from snapshots import begun, decoding, running, snapshot_of, waiting

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import KVSegment, Placement
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.survey import Survey, Unit, survey


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Groups in flight beside each other, and requests at rest anywhere, on up to eight instances."""
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


def unit_with(found: Survey, instance_id: int) -> Unit:
    return next(unit for unit in found.units if instance_id in unit.instance_ids)


@given(snapshots())
def test_units_partition_the_full_instances(snapshot: Snapshot) -> None:
    found = survey(snapshot)
    members = [i for unit in found.units for i in unit.instance_ids]
    assert sorted(members) == sorted(i.instance_id for i in snapshot.instances)
    assert found.num_instances == len(snapshot.instances)


@given(snapshots())
def test_a_unit_is_ready_if_and_only_if_all_its_instances_are_idle(snapshot: Snapshot) -> None:
    for unit in survey(snapshot).units:
        assert unit.is_ready == all(snapshot.instance[i].is_idle for i in unit.instance_ids)
        assert not (unit.is_ready and unit.is_in_lease)
        assert (unit.available_in == 0.0) or not unit.is_ready


@given(snapshots())
def test_what_rests_is_in_the_one_unit_that_holds_it_and_units_are_no_larger_than_they_must_be(
    snapshot: Snapshot,
) -> None:
    found = survey(snapshot)
    for view in snapshot.running:
        units = [unit for unit in found.units if view in unit.decodes or view in unit.prefills]
        assert len(units) == (1 if view.is_plannable else 0)
        for unit in units:
            assert set(view.placement.instance_ids) <= set(unit.instance_ids)
            assert (view in unit.decodes) == view.is_decoding
    links = [set(view.placement.instance_ids) for view in snapshot.running if view.is_plannable]
    links += [set(batch.plan.group.instance_ids) for batch in snapshot.batches]
    for unit in found.units:
        for size in range(1, len(unit.instance_ids)):
            for part in map(set, combinations(unit.instance_ids, size)):
                assert any(link & part and link - part for link in links), "it could be two units"


@given(snapshots())
def test_decodes_are_counted_wherever_they_are(snapshot: Snapshot) -> None:
    found = survey(snapshot)
    in_flight = sum(len(batch.plan.request_ids) for batch in snapshot.batches)
    assert sum(unit.num_decodes for unit in found.units) == in_flight + sum(
        len(unit.decodes) for unit in found.units
    )


def test_a_unit_comes_free_when_the_present_steps_of_all_its_batches_end() -> None:
    a, b = decoding("a", 9, (0,)), decoding("b", 9, (1,))
    lease = replace(decode([a], (0,), {"a": 0}, num_steps=8), predicted_time=0.1)
    step = replace(decode([b], (1,), {"b": 1}), predicted_time=0.7)
    batches = [running(0, lease, num_steps_taken=3), running(1, step)]
    both = decoding("both", 9, (0, 1))
    for now, expected in ((0.35, 0.35), (0.75, 0.0)):
        (unit,) = survey(snapshot_of([99, 99], [a, b, both], batches, now=now)).units
        assert unit.available_in == pytest.approx(expected)
        assert not unit.is_in_lease, "the prefill step does not end early"
    apart = survey(snapshot_of([99, 99], [a, b], batches, now=0.35))
    assert [unit.is_in_lease for unit in apart.units] == [True, False]
    assert [unit.available_in for unit in apart.units] == pytest.approx([0.05, 0.35])


def test_a_step_ends_as_long_after_the_one_before_as_predicted_however_long_those_took() -> None:
    view = decoding("a", 9, (0,))
    plan = replace(decode([view], (0,), {"a": 0}, num_steps=100), predicted_time=0.1)
    lease = replace(running(0, plan, num_steps_taken=50), stepped_at=4.2)
    (unit,) = survey(snapshot_of([999], [view], [lease], now=4.25)).units
    assert unit.available_in == pytest.approx(0.05)


def test_a_batch_of_unknown_time_may_end_at_once() -> None:
    view = waiting("a", 9)
    snapshot = snapshot_of([99], [view], [running(0, prefill([view], (0,)))], now=5.0)
    assert survey(snapshot).units[0].available_in == 0.0


def test_kv_of_requests_that_have_ended_counts_as_free_once_their_batch_runs_no_more() -> None:
    going, ended = decoding("going", 20, (0,)), decoding("ended", 30, (0, 1), max_tokens=9)
    plan = decode([going, ended], (0, 1), {"going": 0, "ended": 1}, num_steps=8)
    snapshot = snapshot_of([100, 100], [going, ended], [running(0, plan)])
    assert dict(survey(snapshot).free) == {0: 100 - 20 - 8 - 15, 1: 100 - 15 - 8}
    running_views = tuple(replace(view, has_ended=view.request_id == "ended") for view in snapshot.running)
    ending = replace(snapshot, running=running_views)
    assert dict(survey(ending).free) == {0: 100 - 20 - 8, 1: 100}


def with_tiers(snapshot: Snapshot) -> Snapshot:
    """With a host tier, 8, and an instance that only attends, 9."""
    host = ElasticInstance(8, 1, InstanceKind.HOST, 1000)
    attending = ElasticInstance(9, 1, InstanceKind.ATTENTION, 1000)
    return replace(snapshot, instances=(*snapshot.instances, host, attending))


@pytest.mark.parametrize("elsewhere", [8, 9])
def test_requests_with_kv_anywhere_but_on_full_instances_are_left_alone(elsewhere: int) -> None:
    segments = (KVSegment("away", range(5), 0), KVSegment("away", range(5, 9), elsewhere))
    away = RequestView("away", 9, 1, 16, 0.0, None, Placement(segments))
    here = decoding("here", 9, (0, 1))
    found = survey(with_tiers(snapshot_of([99, 99], [away, here])))
    assert dict(found.free).keys() == {0, 1}
    assert [unit.decodes for unit in found.units] == [[here]]


def test_a_batch_may_have_instances_that_are_not_surveyed() -> None:
    view = decoding("r", 9, (0, 9))
    plan = decode([view], (0, 9), {"r": 0})
    found = survey(with_tiers(snapshot_of([99], [view], [running(0, plan)])))
    assert [(unit.instance_ids, unit.is_ready) for unit in found.units] == [((0,), False)]
    moved = decoding("r", 9, (9,))
    alone = decode([moved], (9,), {"r": 9})
    found = survey(with_tiers(snapshot_of([99], [moved], [running(0, alone)])))
    assert [unit.is_ready for unit in found.units] == [True]


def test_who_waits_is_not_tied_to_any_unit_and_who_moves_or_has_ended_is_not_planned() -> None:
    views = [waiting("a", 9), waiting("b", 9), decoding("c", 9, (0,))]
    snapshot = snapshot_of([99], views)
    assert [view.request_id for view in survey(snapshot).waiting] == ["a", "b"]
    moving = replace(snapshot.running[0], is_migrating=True)
    ended = replace(snapshot.waiting[0], has_ended=True)
    found = survey(replace(snapshot, running=(moving,), waiting=(ended, snapshot.waiting[1])))
    assert [view.request_id for view in found.waiting] == ["b"]
    assert found.units[0].decodes == []


def test_what_an_ended_request_leaves_elsewhere_is_no_room_for_plans() -> None:
    view = decoding("r", 10, (0, 9))
    plan = decode([view], (0, 9), {"r": 0})
    snapshot = with_tiers(snapshot_of([99], [view], [running(0, plan)]))
    ended = replace(snapshot.running[0], has_ended=True)
    assert dict(survey(replace(snapshot, running=(ended,))).free) == {0: 99}


def test_an_instance_whose_batch_is_ending_can_be_planned_for_and_comes_free_when_that_ends() -> None:
    view = decoding("r", 9, (0,))
    ending = running(1, replace(decode([view], (0, 2), {"r": 0}), predicted_time=0.5), started_at=1.0)
    snapshot = replace(snapshot_of([1000] * 3, [view], now=1.2), ending=(ending,))
    found = survey(snapshot)
    assert {unit.instance_ids: unit.available_in for unit in found.units} == {
        (0,): pytest.approx(0.3),
        (1,): 0.0,
        (2,): pytest.approx(0.3),
    }
    assert all(unit.is_ready for unit in found.units)
    late = survey(replace(snapshot, now=2.0))
    assert {unit.available_in for unit in late.units} == {0.0}
