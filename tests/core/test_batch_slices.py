"""Which batches the timeline of `loong.core.timeline` keeps."""

from loong.core.events import BatchFinished, Event, InstanceLost
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.instructions import ReleaseKV, RunBatch
from loong.core.plan import BatchPlan, IterationPlan
from loong.core.snapshot import Snapshot
from loong.core.timeline import Timeline

INSTANCES = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 100, kv_used=10 * i) for i in range(3))


def told(*events: Event) -> list[tuple[int, float, float]]:
    """Batches 1 on (0, 1) and 2 on (2,) start at time 1; id, start and end of the slices after `events`."""
    batches = [RunBatch(i, BatchPlan(ESPGroup(group), (), ()), ()) for i, group in ((1, (0, 1)), (2, (2,)))]
    timeline = Timeline(max_slices=9)
    timeline.planned(InstanceLost(1.0, 9), Snapshot(1.0, ()), IterationPlan(), batches)
    for event in events:
        timeline.took_in(event)
        timeline.planned(event, Snapshot(event.time, INSTANCES), IterationPlan(), ())
    return [(piece.batch_id, piece.started_at, piece.ended_at) for piece in timeline.slices]


def test_a_batch_is_a_slice_once_it_has_finished() -> None:
    assert told(BatchFinished(3.0, 2, 1)) == [(2, 1.0, 3.0)]
    assert told(BatchFinished(3.0, 2, 1), BatchFinished(4.0, 1, 1)) == [(2, 1.0, 3.0), (1, 1.0, 4.0)]


def test_a_slice_tells_the_kv_of_its_group_and_other_instructions_leave_no_slice() -> None:
    timeline = Timeline()
    batch = RunBatch(1, BatchPlan(ESPGroup((2, 1)), (), ()), ())
    told = (ReleaseKV("r", (0,)), batch)
    timeline.planned(InstanceLost(1.0, 9), Snapshot(1.0, INSTANCES), IterationPlan(), told)
    timeline.planned(BatchFinished(3.0, 1, 1), Snapshot(3.0, INSTANCES), IterationPlan(), ())
    (piece,) = timeline.slices
    assert piece.kv_used == ((2, 20), (1, 10))


def test_a_batch_whose_instance_is_lost_never_is() -> None:
    events = (InstanceLost(2.0, 1), BatchFinished(3.0, 1, 1), BatchFinished(4.0, 2, 1))
    assert told(*events) == [(2, 1.0, 4.0)]
