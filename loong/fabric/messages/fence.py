"""The messages that a process keeps: those of open batches and migrations, and of later ones."""

from typing import Protocol

from loong.fabric.errors import InvalidMessageError

_MOST_CLOSED = 4096  # closed ids to remember; older ones count as closed


class Fence(Protocol):
    """The open batches or migrations of one plane. Not thread safe."""

    def open(self, its_id: int) -> None:
        """Open a batch or migration. Raises `InvalidMessageError` if it is or was open."""

    def close(self, its_id: int) -> None:
        """Close a batch or migration. Later messages for it are stale."""

    def is_stale(self, its_id: int) -> bool:
        """Return whether a message for this batch or migration is to be dropped."""


class GrowingFence:
    """Implements Fence for ids that only grow. An id below an opened one can no longer be opened."""

    def __init__(self, kind: str) -> None:
        """Set up. `kind` is the name in errors."""
        self._kind, self._last, self._open = kind, -1, set[int]()

    def open(self, its_id: int) -> None:
        """See Fence. Raises `InvalidMessageError` also if the id does not grow."""
        if its_id <= self._last:
            raise InvalidMessageError(f"{self._kind} {its_id} after {self._kind} {self._last}")
        self._last = its_id
        self._open.add(its_id)

    def close(self, its_id: int) -> None:
        """See Fence."""
        self._open.discard(its_id)

    def is_stale(self, its_id: int) -> bool:
        """See Fence."""
        return its_id <= self._last and its_id not in self._open


class AnyOrderFence:
    """Implements Fence for ids in almost any order, like those of batches that wait for others."""

    def __init__(self, kind: str) -> None:
        """Set up. `kind` is the name in errors."""
        self._kind, self._open = kind, set[int]()
        self._closed: dict[int, None] = {}  # the latest, oldest first
        self._floor = -1  # ids up to here are closed unless open

    def open(self, its_id: int) -> None:
        """See Fence."""
        if its_id in self._open or self.is_stale(its_id):
            raise InvalidMessageError(f"{self._kind} {its_id} is opened twice")
        self._open.add(its_id)

    def close(self, its_id: int) -> None:
        """See Fence."""
        self._open.discard(its_id)
        self._closed[its_id] = None
        if len(self._closed) > _MOST_CLOSED:
            oldest_id = next(iter(self._closed))
            del self._closed[oldest_id]
            self._floor = max(self._floor, oldest_id)

    def is_stale(self, its_id: int) -> bool:
        """See Fence."""
        return its_id in self._closed or (its_id <= self._floor and its_id not in self._open)
