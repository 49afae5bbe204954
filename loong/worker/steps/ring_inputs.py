"""The inputs of captured steps in which KV travels: memory allocated once, and filled for each step."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep, concatenate
from loong.attention.local import tasks_of
from loong.attention.ring import kept_rows, own_rows
from loong.attention.ring_kv import RingKV
from loong.attention.shared import NO_READERS, SharedReaders, readers_of
from loong.core.placement import InstanceId
from loong.core.plan import QueryBlock
from loong.core.request import RequestId
from loong.core.shared_kv import MAX_GROUPS, MAX_LEVELS
from loong.kernels.attend_task import AttendTask
from loong.kernels.shared_table import SharedTable
from loong.model.device import AttendTable
from loong.worker.steps.decode_state import set_first
from loong.worker.steps.mixed_inputs import GROUP_STEP_SIZES
from loong.worker.steps.step_inputs import StepInputs

MAX_KV_ROWS = 4096  # that a member computes
MAX_KV_ROOM = 16_384  # for the KV that a member brings
KV_SIZES = (*GROUP_STEP_SIZES, 2560, 3072, 3584, MAX_KV_ROWS)  # of graphs
MAX_BLOCKS = 64  # of prompts, of one master
MAX_READERS = 512  # queries that read together
_TASK_SIZE = len(AttendTask._fields)


Words: TypeAlias = Callable[[int], Tensor]  # allocates int64 zeros of this number


class RowList:
    """Rows to copy: `sources` [S] and, if it has them, `targets` [S], of which a step has `count` [1]."""

    def __init__(self, words: Words, most: int, *, has_targets: bool = True) -> None:
        self.count, self.sources = words(1), words(most)
        self.targets = words(most) if has_targets else None

    @property
    def columns(self) -> list[Tensor]:
        """Return `sources`, and `targets` if it has them."""
        return [self.sources] if self.targets is None else [self.sources, self.targets]

    def fill(self, *columns: Tensor) -> None:
        """Write the rows of a step."""
        self.count.fill_(len(columns[0]))
        for mine, given in zip(self.columns, columns, strict=True):
            mine[: len(given)] = given

    def copy_from(self, host: "RowList") -> None:
        """Take the rows of a step from the host."""
        used = slice(0, int(host.count))
        self.count.copy_(host.count, non_blocking=True)
        for mine, theirs in zip(self.columns, host.columns, strict=True):
            mine[used].copy_(theirs[used], non_blocking=True)


class RingInputs:
    """The inputs of a step, on the host or on the device.

    Rows of a step are the tokens of which this instance is the master. Each member sends a block of KV, whose
    rows are those of `OwnRows`. Row r of instance i is row i * room + r of all.
    """

    def __init__(
        self, words: Words, num_instances: int, room: int, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        self.room = room
        sizes = [4 * MAX_KV_ROWS, MAX_READERS, MAX_GROUPS * _TASK_SIZE]
        sizes += [MAX_BLOCKS * _TASK_SIZE] * len(windows)
        self._rows = words(sum(sizes))
        columns, self._readers, self._shared_tasks, *tasks = torch.split(self._rows, sizes)
        (
            self.token_ids,
            self.positions,
            self.lengths,
            self.new_rows,  # of the own block
        ) = columns.view(4, -1)
        self._tasks = dict(zip(windows, tasks, strict=True))
        self.tables = {
            window: AttendTable((its.view(MAX_BLOCKS, _TASK_SIZE),), window=window)
            for window, its in self._tasks.items()
        }
        most = num_instances * room
        self.history = RowList(words, room)  # from the pool into the own block
        self.kept = RowList(words, most)  # from all blocks into the pool
        self.keys = RowList(words, most, has_targets=False)  # from all blocks, by prompt and position
        self._shared = RowList(words, most, has_targets=False)  # of all blocks, by group

    @property
    def reads_together(self) -> bool:
        """Return whether steps may read KV together: not where layers with a window read all of it again."""
        return list(self._tasks) == [None]

    def fill(self, step: AttentionStep, size: int, inputs: StepInputs) -> bool:
        """Write a step, on the host, for a graph of this size. Return whether prompts read KV together.

        Rows after it belong to no prompt, and their KV is neither sent nor kept.
        """
        self._rows.zero_()
        for rows in (self.new_rows, self._readers):
            rows.fill_(-1)
        num_rows = len(inputs.token_ids)
        self.token_ids[:num_rows] = inputs.token_ids
        self.positions[:num_rows] = inputs.positions
        self.lengths[:num_rows] = inputs.lengths
        sent = {i: RingKV.of(step, i) for i in step.batch.group.instance_ids}
        own = own_rows(step, sent[step.instance_id])
        self.new_rows[: len(own.new_rows)] = own.new_rows
        self.history.fill(own.history_slots, own.history_rows)
        kept = [
            (source_id * self.room + rows, slots)
            for source_id, its in sent.items()
            for rows, slots in (kept_rows(step, its),)
        ]
        self.kept.fill(*(torch.cat(parts) for parts in zip(*kept, strict=True)))
        readers = NO_READERS
        if self.reads_together:
            readers = readers_of(step, step.blocks, step.batch.group.instance_ids, min(size, MAX_READERS))
        key_rows = {i: self._key_rows(sent, i) for i in dict.fromkeys(b.request_id for b in step.blocks)}
        self._list_shared(step, readers, key_rows, min(size, MAX_READERS))
        self._list_keys(step, readers, key_rows)
        return readers.is_reading

    def shared(self, size: int) -> SharedTable:
        """Return what prompts of a step of this size read together: slots are rows of all blocks."""
        tasks = self._shared_tasks.view(MAX_GROUPS, _TASK_SIZE)
        return SharedTable(self._readers[: min(size, MAX_READERS)], MAX_LEVELS, tasks, self._shared.sources)

    def copy_from(self, host: "RingInputs") -> None:
        """Take the inputs of a step from the host."""
        self._rows.copy_(host._rows, non_blocking=True)
        for mine, theirs in (
            (self.history, host.history),
            (self.kept, host.kept),
            (self.keys, host.keys),
            (self._shared, host._shared),
        ):
            mine.copy_from(theirs)

    def _list_shared(
        self,
        step: AttentionStep,
        readers: SharedReaders,
        key_rows: Mapping[RequestId, Tensor],
        rows_of_level: int,
    ) -> None:
        """List the queries that read together, their tasks, and the rows of each group's KV."""
        rows = {
            request_id: [
                row
                for block in step.blocks
                if block.request_id == request_id
                for row in range(step.rows[block].start, step.rows[block].stop)
            ]
            for request_id in readers.ordered_ids
        }
        set_first(self._readers, list(chain.from_iterable(rows.values())))
        tasks = readers.tasks(list(map(len, rows.values())), rows_of_level)
        set_first(self._shared_tasks, list(chain.from_iterable(tasks)))
        self._shared.fill(concatenate(key_rows[i][p.start : p.stop : p.step] for i, p in readers.listed))

    def _list_keys(
        self, step: AttentionStep, readers: SharedReaders, key_rows: Mapping[RequestId, Tensor]
    ) -> None:
        """List the KV that each own prompt reads alone by position, so that a block attends it in one task.

        All that it reads with others comes before its queries: these count positions without it.
        """
        tasks: dict[int | None, list[int]] = {window: [] for window in self._tasks}
        listed = []
        first = 0
        for request_id, rows in key_rows.items():
            alone = torch.ones(len(rows), dtype=torch.bool)
            for positions in readers.positions.get(request_id, ()):
                alone[positions.start : positions.stop : positions.step] = False
            listed.append(rows[alone])
            num_keys = len(listed[-1])
            for block in step.blocks:
                if block.request_id == request_id:
                    its = _earlier(block, len(rows) - num_keys)
                    for window, lines in tasks.items():
                        for task in tasks_of(its, step.rows[block].start, first, (range(num_keys),), window):
                            lines.extend(task)
            first += num_keys
        self.keys.fill(concatenate(listed))
        for window, lines in tasks.items():
            set_first(self._tasks[window], lines)

    def _key_rows(self, sent: Mapping[InstanceId, RingKV], request_id: RequestId) -> Tensor:
        """Return the row of each of a request's keys, by position [S] int64."""
        pieces = [(i, row, kv) for i, its in sent.items() for row, kv in its.pieces(request_id)]
        rows = torch.empty(sum(len(p) for _, _, kv in pieces for p in kv), dtype=torch.int64)
        for source_id, first, kv in pieces:
            row = source_id * self.room + first
            for positions in kv:
                rows[positions.start : positions.stop : positions.step] = torch.arange(
                    row, row + len(positions)
                )
                row += len(positions)
        return rows


def num_brought(step: AttentionStep) -> Mapping[InstanceId, int]:
    """Return the rows that each member sends in a step in which only KV travels: at least one."""
    return {i: max(1, RingKV.of(step, i).num_rows) for i in step.batch.group.instance_ids}


def _earlier(block: QueryBlock, number: int) -> QueryBlock:
    """Return a block with its positions lowered by a number."""
    start, stop, step = block.positions.start, block.positions.stop, block.positions.step
    return block._replace(positions=range(start - number, stop - number, step))
