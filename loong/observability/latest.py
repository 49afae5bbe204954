"""The newest items of a stream, bounded in bytes."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """A queue that drops its oldest items once their sizes exceed `max_bytes`.

    `size_of` returns the bytes that an item occupies in memory, the same each time. An item larger than the
    bound is not kept.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[T], int]) -> None:
        self._max_bytes, self._size_of = max_bytes, size_of
        self._items: deque[T] = deque()
        self._num_bytes = 0

    def append(self, item: T) -> None:
        """Add the newest item."""
        self._items.append(item)
        self._num_bytes += self._size_of(item)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= self._size_of(self._items.popleft())

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items, oldest first."""
        return iter(self._items)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)
