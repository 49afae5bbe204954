"""The rules of what requests read that they have not computed."""

from loong.core.errors import InvalidPlanError
from loong.core.placement import KVSegment
from loong.core.plan import Borrowing, IterationPlan
from loong.core.positions import first_overlap, is_within
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot


def check_borrowings(snapshot: Snapshot, plan: IterationPlan) -> None:
    """Check that requests borrow as they begin, once, what is there for them, and no position twice."""
    seen = set()
    for borrowing in plan.borrowings:
        request_id = borrowing.request_id
        view = snapshot.request.get(request_id)
        if view is None or view.has_begun or request_id in seen:
            what = "is not live" if view is None else "has begun" if view.has_begun else "does so already"
            raise InvalidPlanError(f"request {request_id} is to borrow KV, but {what}")
        seen.add(request_id)
        _check_segments(view, borrowing)
        _check_end(view, borrowing)


def _check_segments(view: RequestView, borrowing: Borrowing) -> None:
    if (twice := first_overlap(segment.positions for segment in borrowing.segments)) is not None:
        raise InvalidPlanError(f"request {view.request_id} is to borrow positions {twice} twice")
    for segment in borrowing.segments:
        if not _is_cached(view, segment):
            raise InvalidPlanError(
                f"request {view.request_id} is to borrow {segment}, which is not there for it"
            )


def _check_end(view: RequestView, borrowing: Borrowing) -> None:
    if not view.no_ends:
        return
    placement = view.borrowing(borrowing.segments).placement
    if placement.has_holes or any(placement.stop in positions for positions in view.no_ends):
        raise InvalidPlanError(
            f"request {view.request_id} is to begin at position {placement.first_missing}, "
            f"before which layers with a window have no KV, or to have holes"
        )


def _is_cached(view: RequestView, segment: KVSegment) -> bool:
    place = segment.owner_id, segment.instance_id
    there = [c.segment.positions for c in view.cached if (c.segment.owner_id, c.segment.instance_id) == place]
    return is_within(segment.positions, there)
