"""The free slots of a pool, allocated so that the slots of a request are contiguous where possible."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_LONG = 2048  # slots: an owner that needs as many begins where there is room to grow
_SHORT = 32  # slots: a shorter run is loose
_MOST_LOOSE = 1 << 16
_NONE = np.empty(0, dtype=np.int64)

Slots: TypeAlias = NDArray[np.int64]


class FreeSlots:
    """Slots from 0 on, free at first, as runs of adjoining ones.

    Attention of a long prompt reads keys with contiguous slots in place, and copies others first. So an owner
    that continues gets the slots next to its last one. An owner that will need many begins in the middle of
    the longest run. So both it and the owner before that run can grow. Small numbers of slots come from the
    far end.

    Decodes take and release slots by the thousand, in no order. Their released slots are kept loose, for
    other small requests. They are put back into the runs when there are too many, or when no run is long
    enough.
    """

    def __init__(self, num_slots: int) -> None:
        self._starts = [0] if num_slots else []  # of the runs, in order
        self._stops = [num_slots] if num_slots else []
        self._loose: Slots = _NONE
        self._num_left = 0  # the number of loose slots after the last tidy
        self._number = num_slots

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int]]) -> "FreeSlots":
        """Return the free slots of some runs, as [first, end)."""
        free = cls(0)
        for start, stop in runs:
            free.give(np.arange(start, stop))
        return free

    def __len__(self) -> int:
        return self._number

    def take(self, number: int, after: int | None = None, expected: int = 0) -> Slots:
        """Take slots [number] for one owner; at least that many must be free.

        `after` is the owner's last slot, if it has one, and `expected` its total need, these included.
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
        """Take slots [number] for many owners that need few each; at least that many must be free."""
        self._number -= number
        pieces = [self._take_loose(min(number, len(self._loose)))]
        number -= len(pieces[0])
        while number:
            pieces.append(self._last(number))
            number -= len(pieces[-1])
        return np.concatenate(pieces)

    def give(self, slots: Slots) -> None:
        """Take back distinct slots [n] that were taken."""
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
        """Return the longest run and the first slot in it for `number` slots; None if it is too short."""
        lengths = np.subtract(self._stops, self._starts)
        if len(self._loose) > self._num_left and number > lengths.max(initial=0):
            self._tidy()
            lengths = np.subtract(self._stops, self._starts)
        if number > lengths.max(initial=0):
            return None
        index = int(lengths.argmax())
        start, spare = self._starts[index], int(lengths[index]) - number
        return index, start + (spare // 2 if start else 0)  # no owner is before the first run

    def _tidy(self) -> None:
        """Put loose slots back into the runs, except runs that would be short."""
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
        """Return the index of the run that begins with a slot."""
        index = bisect_left(self._starts, slot)
        return index if index < len(self._starts) and self._starts[index] == slot else None

    def _cut(self, index: int, start: int, number: int) -> Slots:
        """Take up to `number` slots from `start` on out of a run."""
        before, behind = self._starts[index], self._stops[index]
        stop = min(start + number, behind)
        left = [(a, b) for a, b in ((before, start), (stop, behind)) if a < b]
        self._starts[index : index + 1] = [a for a, _ in left]
        self._stops[index : index + 1] = [b for _, b in left]
        return np.arange(start, stop)

    def _last(self, number: int) -> Slots:
        """Take up to `number` slots from the end of the last run, or loose ones."""
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
        """Put a run back, merged with those that it adjoins."""
        first = index = bisect_left(self._starts, start)
        if first and self._stops[first - 1] == start:
            first -= 1
            start = self._starts[first]
        if index < len(self._starts) and self._starts[index] == stop:
            stop = self._stops[index]
            index += 1
        self._starts[first:index] = [start]
        self._stops[first:index] = [stop]


def runs_of(slots: Slots) -> tuple[tuple[int, int], ...]:
    """Return the runs of ascending slots [n], as [first, end)."""
    if not len(slots):
        return ()
    starts, stops = _runs_of(slots)
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


def _runs_of(slots: Slots) -> tuple[Slots, Slots]:
    """Return the beginnings and ends of the runs of ascending slots [n], of which there is at least one."""
    ends = np.flatnonzero(np.diff(slots) != 1)
    return slots[np.append(0, ends + 1)], slots[np.append(ends, len(slots) - 1)] + 1


def _members(starts: Slots, stops: Slots) -> Slots:
    """Return the slots of runs, one after the other."""
    lengths = stops - starts
    return np.repeat(stops - lengths.cumsum(), lengths) + np.arange(lengths.sum())
