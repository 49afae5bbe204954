"""The memory of layers with a window, which keep KV of few positions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loong.core.errors import ConfigError
from loong.core.placement import CachedKV
from loong.core.positions import num_below, subtract


@dataclass(frozen=True, slots=True)
class WindowMemory:
    """Room for KV of `capacity` tokens on each instance in layers with a window, of which the largest is
    `window`.

    At most `most_requests` of two windows or more have KV at a time, or more that are shorter. So the windows
    of all have room. Raises ConfigError if not even one has.
    """

    window: int
    capacity: int
    most_requests: int

    def __post_init__(self) -> None:
        if self.most_requests < 1 or self.capacity <= self.window:
            raise ConfigError(
                f"layers with a window of {self.window} need KV of more than {self.capacity} tokens"
            )

    @classmethod
    def of(cls, window: int, capacity: int, num_batched_tokens: int) -> "WindowMemory":
        """Return the memory if batches compute up to `num_batched_tokens` on an instance.

        One such batch may run while the next is planned. A request has twice its window on an instance, as
        decodes go on before what has left the window is dropped.
        """
        return cls(window, capacity, (capacity - 2 * num_batched_tokens) // (2 * window))

    @property
    def room_of_requests(self) -> int:
        """Return the tokens that requests may have by `num_held`, all together."""
        return self.most_requests * 2 * self.window

    def num_held(self, num_tokens: int) -> int:
        """Return the most tokens of a request here that has `num_tokens` in other layers at its end."""
        return min(2 * self.window, num_tokens)

    def no_ends(self, windowless: Iterable[range]) -> tuple[range, ...]:
        """Return the positions at which no request can begin to compute, if KV of `windowless` is gone."""
        return tuple([range(gone[0] + 1, gone[-1] + self.window) for gone in windowless if gone])


def ending_before(parts: Sequence[CachedKV], no_ends: Sequence[range]) -> tuple[CachedKV, ...]:
    """Return cached KV up to the first gap, or to the last position before it that is not of `no_ends`."""
    stop = max([part.segment.positions[-1] + 1 for part in parts], default=0)
    gaps = subtract((range(stop),), *[part.segment.positions for part in parts])
    end = min([gap[0] for gap in gaps if gap], default=stop)
    while starts := [positions.start for positions in no_ends if end in positions]:
        end = min(starts) - 1
    found = [
        part._replace(segment=part.segment._replace(positions=part.segment.positions[:number]))
        for part in parts
        if (number := num_below((part.segment.positions,), end))
    ]
    return tuple(found)
