"""KV in too many pieces, as after several losses, does not make plans slow."""

from dataclasses import replace

import pytest
from simulation import instances_with, simulate, timed_request
from snapshots import begun, snapshot_of

from loong.core.decision import DecisionKind
from loong.core.events import Event, InstanceJoined, InstanceLost
from loong.core.placement import KVSegment, Placement
from loong.core.request import RequestView
from loong.core.snapshot import ClusterStats, Snapshot
from loong.scheduler.common.fragments import drop_fragments
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy
from loong.scheduler.tuning import MAX_PIECES

LOST = ClusterStats(num_losses=1)
NUM_GAPS = MAX_PIECES // 2


def with_gaps(number: int) -> RequestView:
    """Return a request whose KV is in pieces of 3 positions with gaps of 2 between them."""
    pieces = (range(5 * n, 5 * n + 3) for n in range(number + 1))
    view = begun("r", 1000, 3, (0,))
    return replace(view, placement=Placement(tuple(KVSegment("r", p, 0) for p in pieces)))


def after_a_loss(view: RequestView) -> Snapshot:
    return replace(snapshot_of([5000], [view]), stats=LOST)


def test_only_kv_before_the_first_gap_stays_where_there_are_too_many() -> None:
    assert drop_fragments(after_a_loss(with_gaps(NUM_GAPS - 1))) is None
    view = with_gaps(NUM_GAPS)
    plan = make_policy("esp", PolicyConfig())(after_a_loss(view), None)  # type: ignore[arg-type]  # no need
    evicted = [eviction.segment.positions for eviction in plan.evictions]
    assert evicted == [segment.positions for segment in view.placement.segments[1:]]
    assert [(d.kind, d.request_ids) for d in plan.decisions] == [(DecisionKind.EVICT, ("r",))]


def test_a_stripe_is_cut_at_the_first_gap() -> None:
    view = with_gaps(NUM_GAPS)
    long = KVSegment("r", range(1, 900, 900 // 7), 1)
    view = replace(view, placement=Placement((*view.placement.segments, long)))
    plan = drop_fragments(after_a_loss(view))
    assert plan is not None
    first = view.placement.first_missing
    left = [eviction.segment for eviction in plan.evictions if eviction.segment.instance_id == 1]
    assert left == [long._replace(positions=range(1 + 128, 900, 128))]
    assert first == 3


def test_nothing_in_flight_is_touched_nor_anything_before_a_loss() -> None:
    view = with_gaps(NUM_GAPS)
    assert drop_fragments(snapshot_of([5000], [view])) is None
    assert drop_fragments(after_a_loss(replace(view, is_migrating=True))) is None


@pytest.mark.parametrize("name", ["esp", "esp-fixed-2"])
def test_no_request_comes_to_have_many_more_pieces_after_any_losses(name: str) -> None:
    """Repairs without a pause are striped, so that each gap becomes a piece for each instance."""
    num_instances, seconds = 4, 0.3
    instances = instances_with([100_000] * num_instances)
    incidents: list[Event] = []
    for number in range(1, 16):
        lost = instances[number % num_instances]
        incidents.append(InstanceLost(seconds * number, lost.instance_id, returns=True))
        incidents.append(InstanceJoined(seconds * number + 0.05, lost))
    config = PolicyConfig(max_num_batched_tokens=1024, chunk_tokens=1024)
    requests = [timed_request(n, 20_000, 10, 0.1 * n) for n in range(3)]
    run = simulate(name, [100_000] * num_instances, requests, incidents=incidents, config=config)
    placements = [v.placement for snapshot, _ in run.plans for v in snapshot.running if v.is_plannable]
    assert (
        max(len(p.segments) + len(p.holes) for p in placements if p.has_holes)
        < 3 * num_instances * MAX_PIECES
    )
    assert any(plan.evictions for _, plan in run.plans)
