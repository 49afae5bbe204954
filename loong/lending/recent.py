"""Memory of recent events, for as long as messages about them may still come."""

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key, each forgotten some seconds after it was set."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: dict[K, tuple[V, float]] = {}  # the oldest first

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if there is none."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def set(self, key: K, value: V, now: float) -> None:
        """Set a value, and forget those that are too old."""
        self._values.pop(key, None)
        self._values[key] = value, now
        while (first := next(iter(self._values.items())))[1][1] <= now - self._seconds:
            del self._values[first[0]]
