"""The free slots of a pool, handed out so that what belongs together lies together."""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

_LONG = 2048  # slots: who needs as many begins where there is room to go on
_NONE = np.empty(0, dtype=np.int64)


class FreeSlots:
    """Slots from 0 on, free at first, as runs of adjoining ones.

    Attention of one long prompt reads keys that lie in a row where they are, and copies others first. So
    whoever goes on is given what is next to the slots it has, and whoever will need many begins in the
    longest run, which is halved, so that both who is before it and who begins there can grow. Few slots come
    from the far end.
    """

    def __init__(self, num_slots: int) -> None:
        self._starts = [0] if num_slots else []  # of the runs, in order
        self._stops = [num_slots] if num_slots else []
        self._number = num_slots

    def __len__(self) -> int:
        return self._number

    def take(self, number: int, after: int | None = None, expected: int = 0) -> NDArray[np.int64]:
        """Hand out slots [number], of which as many are free.

        They are for someone whose last slot is `after`, if it has one, and who needs `expected` with them.
        """
        self._number -= number
        taken = []
        if after is not None and (index := self._run_from(after + 1)) is not None:
            taken.append(self._cut(index, after + 1, number))
            number -= len(taken[0])
        while number:
            taken.append(self._cut(*self._place(number, max(number, expected)), number))
            number -= len(taken[-1])
        pieces = [np.arange(piece.start, piece.stop) for piece in taken]
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, _NONE])

    def give(self, slots: NDArray[np.int64]) -> None:
        """Take back distinct slots [n] that were handed out."""
        if not len(slots):
            return
        self._number += len(slots)
        slots = np.sort(slots)
        ends = np.flatnonzero(np.diff(slots) != 1)
        firsts, lasts = slots[[0, *(ends + 1)]], slots[[*ends, -1]]
        for start, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            self._join(start, last + 1)

    def _place(self, number: int, expected: int) -> tuple[int, int]:
        """The run in which so many slots had better begin, and the first of them."""
        if expected >= _LONG:
            lengths = np.subtract(self._stops, self._starts)
            index = int(lengths.argmax())
            start, spare = self._starts[index], int(lengths[index]) - number
            if spare >= 0:
                return index, start + (spare // 2 if start else 0)  # before the first run is nobody
        return len(self._stops) - 1, max(self._starts[-1], self._stops[-1] - number)

    def _run_from(self, slot: int) -> int | None:
        """The run that begins with a slot."""
        index = bisect_left(self._starts, slot)
        return index if index < len(self._starts) and self._starts[index] == slot else None

    def _cut(self, index: int, start: int, number: int) -> range:
        """Take up to so many slots from `start` on out of a run."""
        before, behind = self._starts[index], self._stops[index]
        cut = range(start, min(start + number, behind))
        if start == before and cut.stop < behind:
            self._starts[index] = cut.stop
            return cut
        left = [(a, b) for a, b in ((before, cut.start), (cut.stop, behind)) if a < b]
        self._starts[index : index + 1] = [a for a, _ in left]
        self._stops[index : index + 1] = [b for _, b in left]
        return cut

    def _join(self, start: int, stop: int) -> None:
        """Put a run back, as one with those that it adjoins."""
        first = index = bisect_left(self._starts, start)
        if first and self._stops[first - 1] == start:
            first -= 1
            start = self._starts[first]
        if index < len(self._starts) and self._starts[index] == stop:
            stop = self._stops[index]
            index += 1
        self._starts[first:index] = [start]
        self._stops[first:index] = [stop]
