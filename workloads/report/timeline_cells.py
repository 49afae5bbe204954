"""A run cut into columns of time: the longest work of each column on every instance, and its KV.

A run of any length becomes a picture of bounded size.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil
from typing import TypeAlias

from loong.core.cluster_history import BatchSlice, ChangeKind, ClusterHistory
from loong.core.cost.work import Phase
from loong.core.placement import InstanceId
from loong.workloads.palette import BLUE, GREEN, VERMILION

NUM_COLUMNS = 1200
MAX_LABEL_GAP = (
    2  # columns from one step to the next that share a label, whose letters no wider gap is to cut
)
LONG_SHARE = 0.25  # of the longest prompt, from which prompts are long


class Work(Enum):
    """The kind of work of a batch, as far as colors go."""

    LONG = VERMILION
    SHORT = BLUE
    DECODE = GREEN


@dataclass(frozen=True, slots=True)
class Cell:
    """The work of an instance in a column; `decodes` is set for a batch that also prefills."""

    members: frozenset[InstanceId]
    work: Work
    decodes: bool
    longest_prompt: int


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale that all panels share: the seconds shown, the least length of a long prompt, and the most KV.

    `peak_kv` is a share of an instance's pool.
    """

    start: float
    end: float
    long_prompt: int
    peak_kv: float

    @staticmethod
    def of(histories: Collection[ClusterHistory], window: tuple[float, float] | None) -> "Scale":
        """Return the scale of all histories; `window` None shows everything."""
        start, end = window or (0.0, max((history.end for history in histories), default=0.0) or 1.0)
        batches = [batch for history in histories for batch in history.batches]
        scale = Scale(start, end, long_prompt_of(batches), 0.0)
        held = [
            max(most_by_column(kv_shares(history, i), scale))
            for history in histories
            for i in history.instance_ids
        ]
        return replace(scale, peak_kv=max(held, default=0.0))

    @property
    def column(self) -> float:
        """Return the seconds of a column."""
        return (self.end - self.start) / NUM_COLUMNS

    def time(self, column: int) -> float:
        """Return the time at which a column begins."""
        return self.start + column * self.column


Row: TypeAlias = Mapping[int, Cell]
"""The work of one instance by column; idle columns are missing."""


def long_prompt_of(batches: Iterable[BatchSlice]) -> int:
    """Return the least length of a long prompt; 0 if nothing was prefilled."""
    return ceil(LONG_SHARE * max((batch.longest_prompt for batch in batches), default=0))


def kv_shares(history: ClusterHistory, instance_id: InstanceId) -> list[tuple[float, float]]:
    """Return times and shares of an instance's pool in use from each time on.

    Empty if its size is unknown. An instance that is lost or has left holds nothing.
    """
    capacity = history.kv_capacity.get(instance_id)
    if not capacity:
        return []
    gone = [
        (change.time, 0.0)
        for change in history.changes
        if change.instance_id == instance_id and change.kind in (ChangeKind.LOST, ChangeKind.LEFT)
    ]
    held = [
        (time, tokens / capacity)
        for batch in history.batches
        for time, counts in ((batch.started_at, batch.kv_reserved), (batch.ended_at, batch.kv_used))
        for held_by, tokens in counts
        if held_by == instance_id
    ]
    left = [
        (level.time, level.num_tokens / capacity)
        for level in history.kv_levels
        if level.instance_id == instance_id
    ]
    return sorted(held + gone + left)


def rows_of(history: ClusterHistory, scale: Scale) -> Mapping[InstanceId, Row]:
    """Return the longest work of each column, of every instance."""
    seconds: dict[tuple[InstanceId, int], dict[Cell, float]] = defaultdict(lambda: defaultdict(float))
    for batch in history.batches:
        start, end = max(batch.started_at, scale.start), min(batch.ended_at, scale.end)
        cell = _cell(batch, scale.long_prompt)
        for column in _columns_of(batch, scale):
            share = min(end, scale.time(column + 1)) - max(start, scale.time(column))
            for instance_id in cell.members:
                seconds[instance_id, column][cell] += max(share, 0.0)
    cells: dict[InstanceId, dict[int, Cell]] = {instance_id: {} for instance_id in history.instance_ids}
    for (instance_id, column), shares in seconds.items():
        cells[instance_id][column] = max(shares, key=lambda cell: shares[cell])
    return cells


def served_stretches(history: ClusterHistory, scale: Scale) -> Mapping[InstanceId, list[range]]:
    """Return the columns in which each instance attends for batches of which it is no member."""
    columns: dict[InstanceId, set[int]] = defaultdict(set)
    for batch in history.batches:
        for instance_id in batch.holder_ids:
            columns[instance_id].update(_columns_of(batch, scale))
    return {instance_id: list(_runs(sorted(served))) for instance_id, served in columns.items() if served}


def _runs(columns: Sequence[int]) -> Iterator[range]:
    """Return columns that follow each other, as ranges."""
    start = last = None
    for column in columns:
        if start is None or last is None:
            start = column
        elif column > last + 1:
            yield range(start, last + 1)
            start = column
        last = column
    if start is not None and last is not None:
        yield range(start, last + 1)


def _columns_of(batch: BatchSlice, scale: Scale) -> range:
    """Return the columns in which a batch runs."""
    start, end = max(batch.started_at, scale.start), min(batch.ended_at, scale.end)
    if start >= end:
        return range(0)
    first, last = (min(int((t - scale.start) / scale.column), NUM_COLUMNS - 1) for t in (start, end))
    return range(first, last + 1)


def _cell(batch: BatchSlice, long_prompt: int) -> Cell:
    members = frozenset(batch.group.instance_ids)
    if batch.phase is Phase.DECODE:
        return Cell(members, Work.DECODE, decodes=False, longest_prompt=0)
    work = Work.LONG if 0 < long_prompt <= batch.longest_prompt else Work.SHORT
    return Cell(members, work, batch.phase is Phase.MIXED, batch.longest_prompt)


def stretches(row: Row) -> Iterator[tuple[Cell, range]]:
    """Yield stretches of neighboring columns with equal work."""
    start = last = None
    for column in sorted(row):
        if start is not None and last is not None and (column > last + 1 or row[column] != row[start]):
            yield row[start], range(start, last + 1)
            start = None
        start, last = column if start is None else start, column
    if start is not None and last is not None:
        yield row[start], range(start, last + 1)


def group_stretches(row: Row) -> Iterator[tuple[list[Cell], range]]:
    """Yield stretches of one group with one kind of work, across short gaps."""
    cells: list[Cell] = []
    start = last = 0
    for column in sorted(row):
        cell = row[column]
        if cells:
            is_same = (cells[-1].members, cells[-1].work) == (cell.members, cell.work)
            if not is_same or column - last > MAX_LABEL_GAP:
                yield cells, range(start, last + 1)
                cells = []
        if not cells:
            start = column
        cells.append(cell)
        last = column
    if cells:
        yield cells, range(start, last + 1)


def most_by_column(samples: Sequence[tuple[float, float]], scale: Scale) -> list[float]:
    """Return the maximum of each column."""
    most = [0.0] * NUM_COLUMNS
    column, level = 0, 0.0
    shown = [sample for sample in samples if sample[0] < scale.end]
    for time, share in (*shown, (scale.end, 0.0)):
        if time >= scale.start:
            now = min(int((time - scale.start) / scale.column), NUM_COLUMNS - 1)
            for between in range(column, now + 1):
                most[between] = max(most[between], level)
            column = now
        level = share
    return most
