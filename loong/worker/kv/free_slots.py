"""The free slots of a pool, handed out so that what belongs together lies together."""

from bisect import bisect_left
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_LONG = 2048  # slots: who needs as many begins where there is room to go on
_SHORT = 32  # slots: a run of fewer is loose
_MOST_LOOSE = 1 << 16
_NONE = np.empty(0, dtype=np.int64)

Slots: TypeAlias = NDArray[np.int64]


class FreeSlots:
    """Slots from 0 on, free at first, as runs of adjoining ones.

    Attention of one long prompt reads keys that lie in a row where they are, and copies others first. So
    whoever goes on is given what is next to the slots it has, and whoever will need many begins in the
    longest run, which is halved, so that both who is before it and who begins there can grow. Few slots come
    from the far end.

    Decodes take and leave slots by the thousand, from here and there. What they leave is loose, in no order,
    for those that need few again; it is put back into the runs when it becomes too much, or one is too short.
    """

    def __init__(self, num_slots: int) -> None:
        self._starts = [0] if num_slots else []  # of the runs, in order
        self._stops = [num_slots] if num_slots else []
        self._loose: Slots = _NONE
        self._num_left = 0  # so many were, when the rest was last put back
        self._number = num_slots

    def __len__(self) -> int:
        return self._number

    def take(self, number: int, after: int | None = None, expected: int = 0) -> Slots:
        """Hand out slots [number], of which as many are free.

        They are for someone whose last slot is `after`, if it has one, and who needs `expected` with them.
        """
        self._number -= number
        pieces = []
        if after is not None and (index := self._run_from(after + 1)) is not None:
            pieces.append(self._cut(index, after + 1, number))
            number -= len(pieces[0])
        while number:
            place = self._place_of_many(number) if max(number, expected) >= _LONG else None
            pieces.append(self._last(number) if place is None else self._cut(*place, number))
            number -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, _NONE])

    def take_few_each(self, number: int) -> Slots:
        """Hand out slots [number], of which as many are free, to many who need few each."""
        self._number -= number
        pieces = [self._take_loose(min(number, len(self._loose)))]
        number -= len(pieces[0])
        while number:
            pieces.append(self._last(number))
            number -= len(pieces[-1])
        return np.concatenate(pieces)

    def give(self, slots: Slots) -> None:
        """Take back distinct slots [n] that were handed out."""
        if not len(slots):
            return
        self._number += len(slots)
        slots = np.sort(slots)
        starts, stops = _runs_of(slots)
        is_run = stops - starts >= _SHORT
        for start, stop in zip(starts[is_run].tolist(), stops[is_run].tolist(), strict=True):
            self._join(start, stop)
        if not is_run.all():
            self._loose = np.concatenate([self._loose, slots[np.repeat(~is_run, stops - starts)]])
            if len(self._loose) > max(_MOST_LOOSE, 2 * self._num_left):
                self._tidy()

    def _place_of_many(self, number: int) -> tuple[int, int] | None:
        """The longest run and the first slot that so many had better have of it; None if it is too short."""
        lengths = np.subtract(self._stops, self._starts)
        if len(self._loose) > self._num_left and number > lengths.max(initial=0):
            self._tidy()
            lengths = np.subtract(self._stops, self._starts)
        if number > lengths.max(initial=0):
            return None
        index = int(lengths.argmax())
        start, spare = self._starts[index], int(lengths[index]) - number
        return index, start + (spare // 2 if start else 0)  # before the first run is nobody

    def _tidy(self) -> None:
        """Put what is loose back into the runs, but for what is short there, too."""
        loose_starts, loose_stops = _runs_of(np.sort(self._loose))
        starts = np.concatenate([np.array(self._starts, np.int64), loose_starts])
        stops = np.concatenate([np.array(self._stops, np.int64), loose_stops])
        order = np.argsort(starts)
        starts, stops = starts[order], stops[order]
        is_gap = starts[1:] != stops[:-1]
        starts, stops = starts[np.append(True, is_gap)], stops[np.append(is_gap, True)]
        is_run = stops - starts >= _SHORT
        self._starts, self._stops = starts[is_run].tolist(), stops[is_run].tolist()
        self._loose = _members(starts[~is_run], stops[~is_run])
        self._num_left = len(self._loose)

    def _run_from(self, slot: int) -> int | None:
        """The run that begins with a slot."""
        index = bisect_left(self._starts, slot)
        return index if index < len(self._starts) and self._starts[index] == slot else None

    def _cut(self, index: int, start: int, number: int) -> Slots:
        """Take up to so many slots from `start` on out of a run."""
        before, behind = self._starts[index], self._stops[index]
        stop = min(start + number, behind)
        left = [(a, b) for a, b in ((before, start), (stop, behind)) if a < b]
        self._starts[index : index + 1] = [a for a, _ in left]
        self._stops[index : index + 1] = [b for _, b in left]
        return np.arange(start, stop)

    def _last(self, number: int) -> Slots:
        """Take up to so many slots from the end of the last run, or of what is loose."""
        if not self._starts:
            return self._take_loose(min(number, len(self._loose)))
        start, stop = self._starts[-1], self._stops[-1]
        if stop - start <= number:
            return np.arange(self._starts.pop(), self._stops.pop())
        self._stops[-1] = stop - number
        return np.arange(stop - number, stop)

    def _take_loose(self, number: int) -> Slots:
        self._loose, taken = np.split(self._loose, [len(self._loose) - number])
        return taken

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


def _runs_of(slots: Slots) -> tuple[Slots, Slots]:
    """Where the runs of ascending slots [n], one or more, begin and end."""
    ends = np.flatnonzero(np.diff(slots) != 1)
    return slots[np.append(0, ends + 1)], slots[np.append(ends, len(slots) - 1)] + 1


def _members(starts: Slots, stops: Slots) -> Slots:
    """The slots of runs, one after the other."""
    lengths = stops - starts
    return np.repeat(stops - lengths.cumsum(), lengths) + np.arange(lengths.sum())
