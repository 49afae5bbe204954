"""KV in many pieces, as after several losses of instances that held stripes of a prompt.

The time of a plan grows with the product of pieces that are there and pieces that are missing. So a request
keeps its KV only up to the first missing position when there are too many.
"""

from collections.abc import Iterator

from loong.core.decision import Decision, DecisionKind
from loong.core.plan import Eviction, IterationPlan
from loong.core.positions import num_below
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.tuning import MAX_PIECES

FRAGMENTED = "after losses of instances its KV is in more than {} pieces; what is behind the first gap goes"


def drop_fragments(snapshot: Snapshot) -> IterationPlan | None:
    """Return evictions of KV behind the first gap of requests that have too many pieces, or None."""
    if not snapshot.stats.num_losses:
        return None
    ending_ids = snapshot.ending_ids
    fragmented = [
        view
        for view in snapshot.running
        if view.has_holes
        and len(view.placement.segments) + len(view.placement.holes) > MAX_PIECES
        and view.is_plannable
        and view.request_id not in ending_ids
    ]
    if not fragmented:
        return None
    why = FRAGMENTED.format(MAX_PIECES)
    return IterationPlan(
        evictions=tuple(eviction for view in fragmented for eviction in _behind_the_first_gap(view)),
        decisions=tuple(Decision(DecisionKind.EVICT, (view.request_id,), why) for view in fragmented),
    )


def _behind_the_first_gap(view: RequestView) -> Iterator[Eviction]:
    first = view.placement.first_missing
    for segment in view.placement.segments:
        positions = segment.positions
        if behind := positions[num_below((positions,), first) :]:
            yield Eviction(segment._replace(positions=behind))
