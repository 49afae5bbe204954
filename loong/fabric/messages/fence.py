"""Which messages are still wanted: those of what is open, or is yet to be opened."""

from typing import Protocol

from loong.fabric.errors import InvalidMessageError

_MOST_CLOSED = 4096  # ids that are remembered; one that is so far behind the latest is over


class Fence(Protocol):
    """What of one plane is open. Not thread safe."""

    def open(self, its_id: int) -> None:
        """Open a batch or migration. Raises `InvalidMessageError` if it is open, or was."""

    def close(self, its_id: int) -> None:
        """Close one; whatever still comes for it is stale."""

    def is_stale(self, its_id: int) -> bool:
        """Return whether nobody will want a message any more."""


class GrowingFence:
    """Implements Fence for ids that grow: what was not opened before a later one never is."""

    def __init__(self, kind: str) -> None:
        """Take what errors call it."""
        self._kind, self._last, self._open = kind, -1, set[int]()

    def open(self, its_id: int) -> None:
        """See Fence. Raises `InvalidMessageError` unless ids grow, too."""
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
    """Implements Fence for ids that come in nearly any order, as batches do that wait for others."""

    def __init__(self, kind: str) -> None:
        """Take what errors call it."""
        self._kind, self._open = kind, set[int]()
        self._closed: dict[int, None] = {}  # the latest, oldest first
        self._floor = -1  # all up to here are over

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
