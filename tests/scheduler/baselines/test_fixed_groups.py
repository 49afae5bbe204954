"""The group that takes a request, and its room."""

from plans import decode
from snapshots import decoding, running, snapshot_of, waiting

from loong.core.request import RequestView
from loong.scheduler.baselines.fixed_groups import FixedGroup, groups_of, one_group, one_per_instance, take
from loong.scheduler.common.planning_view import make_planning_view


def joined(groups: list[FixedGroup]) -> list[list[str]]:
    return [[view.request_id for view in group.joining] for group in groups]


def alone(capacities: list[int], views: list[RequestView]) -> list[FixedGroup]:
    return groups_of(
        make_planning_view(snapshot_of(capacities, views)), one_per_instance(range(len(capacities)))
    )


def test_a_group_has_all_that_rests_and_runs_on_its_instances() -> None:
    resting, in_flight = decoding("resting", 6, (0, 1)), decoding("running", 4, (2,))
    lease = running(7, decode([in_flight], [2], {"running": 2}, num_steps=8))
    snapshot = snapshot_of([50, 60, 70], [resting, in_flight], [lease])
    (group,) = groups_of(make_planning_view(snapshot), one_group([0, 1, 2]))
    assert group.decodes == [resting]
    assert group.batches == [lease]
    assert (group.capacity, group.num_free) == (180, 180 - 6 - 4 - 8)
    assert group.num_promised == (6 + 16 - 1) + (4 + 16 - 1)


def test_a_request_goes_where_least_is_promised() -> None:
    groups = alone([100] * 3, [decoding("a", 20, (0,)), decoding("b", 10, (1,)), decoding("c", 12, (2,))])
    take([waiting("d", 9), waiting("e", 9), waiting("f", 9)], groups, max_tokens=1000)
    assert joined(groups) == [["f"], ["d"], ["e"]]


def test_nobody_passes_one_who_waits_for_the_same_group() -> None:
    groups = alone([100, 40], [decoding("a", 30, (0,)), decoding("b", 10, (1,))])
    views = [waiting("large", 80), waiting("small", 5, 2), waiting("smaller", 4, 2)]
    take(views, groups, max_tokens=1000)
    assert joined(groups) == [[], ["small", "smaller"]]


def test_what_no_group_could_ever_hold_keeps_nobody_waiting() -> None:
    groups = alone([50], [])
    take([waiting("large", 80), waiting("small", 5)], groups, max_tokens=1000)
    assert joined(groups) == [["small"]]


def test_a_group_takes_no_more_than_its_next_step_computes() -> None:
    groups = alone([1000, 1000], [])
    take([waiting(f"r{n}", 30) for n in range(9)], groups, max_tokens=50)
    assert joined(groups) == [["r0", "r2"], ["r1", "r3"]]


def test_those_that_decode_together_count_with_their_peak_and_others_with_all_they_will_have() -> None:
    # Together 40 + 24 and 40 + 1 to come: never more than (40 + 24 - 1) + (40 - 1) at once, in fact 82.
    views = [decoding("long", 40, (0,), max_tokens=25), decoding("short", 40, (0,), max_tokens=2)]
    (group,) = alone([110], views)
    assert group.has_room_for(waiting("fits", 20, max_tokens=9))
    assert not group.has_room_for(waiting("not", 20, max_tokens=10))
