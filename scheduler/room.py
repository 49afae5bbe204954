"""Room for the requests at rest: instances that join, and requests that give way."""

from collections.abc import Iterable, Sequence

from loong.core.request import RequestView
from loong.scheduler.cell import Cell, arrival_order


def make_room(cells: Iterable[Cell], lease_steps: int) -> tuple[list[Cell], list[RequestView]]:
    """Cells whose next step has room, as far as can be, and the requests to preempt for it.

    Oldest request first, each cell takes what it needs of the cells after it, so the oldest of all always
    finds room once nothing else runs.
    """
    left, settled, preempted = sorted(cells, key=_age), list[Cell](), list[RequestView]()
    while left:
        cell, *left = left
        if cell.views and not cell.batches:
            cell, victims = _relieved(scaled_up(cell, left), left, lease_steps)
            left = [other for other in left if other.free.keys().isdisjoint(cell.free)]
            preempted += victims
        settled.append(cell)
    return settled, preempted


def scaled_up(cell: Cell, others: Sequence[Cell]) -> Cell:
    """The cell with idle instances that serve nobody, until it has all it wishes; then with any spare room.

    For more than the next step needs, nobody else is disturbed.
    """
    unused = (c for c in others if not c.views and not c.batches)
    for other in sorted(unused, key=lambda c: -c.num_free):
        if cell.num_spare < 0:
            cell = cell.merge(other)
    sparing = (c for c in others if c.num_spare > 0 and not c.is_prefilling)
    for other in sorted(sparing, key=lambda c: (bool(c.batches), -c.num_spare)):
        if cell.num_missing > 0 and other.free.keys().isdisjoint(cell.free):
            cell = cell.merge(other)
    return cell


def preempt_latest(cell: Cell, lease_steps: int) -> tuple[Cell, list[RequestView]]:
    """The cell without those of its latest arrivals, never the first, that its next step has no room for."""
    preempted = []
    while cell.num_missing > 0 and len(cell.views) > 1:
        latest = max(cell.views, key=arrival_order)
        preempted.append(latest)
        cell = cell.without(latest, lease_steps)
    return cell, preempted


def _relieved(cell: Cell, others: Sequence[Cell], lease_steps: int) -> tuple[Cell, list[RequestView]]:
    """Preempt in the cell, then in idle cells of later requests, latest first."""
    cell, preempted = preempt_latest(cell, lease_steps)
    for other in reversed(others):
        if cell.num_missing > 0 and not other.batches and other.free.keys().isdisjoint(cell.free):
            cell, victims = preempt_latest(cell.merge(other), lease_steps)
            preempted += victims
    return cell, preempted


def _age(cell: Cell) -> tuple[float, str]:
    """When its oldest request came; never, if it has none."""
    return min(map(arrival_order, cell.views), default=(float("inf"), ""))
