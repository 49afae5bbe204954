"""The inputs of captured steps in which KV travels: memory allocated once, and filled for each step."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.local import tasks_of
from loong.attention.ring import kept_rows, num_rows_of, own_rows, parts_of
from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.kernels.attend_task import AttendTask
from loong.model.device import AttendTable
from loong.worker.steps.decode_state import set_first
from loong.worker.steps.mixed_inputs import GROUP_STEP_SIZES
from loong.worker.steps.step_inputs import StepInputs

MAX_KV_ROWS = 4096  # that a member computes
MAX_KV_ROOM = 16_384  # for the KV that a member brings
KV_SIZES = (*GROUP_STEP_SIZES, 2560, 3072, 3584, MAX_KV_ROWS)  # of graphs
MAX_BLOCKS = 64  # of prompts, of one master
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

    def __init__(self, words: Words, num_instances: int, room: int) -> None:
        self.room = room
        self._rows = words(4 * MAX_KV_ROWS + MAX_BLOCKS * _TASK_SIZE)
        columns, tasks = torch.split(self._rows, [4 * MAX_KV_ROWS, MAX_BLOCKS * _TASK_SIZE])
        (
            self.token_ids,
            self.positions,
            self.lengths,
            self.new_rows,  # of the own block
        ) = columns.view(4, -1)
        self._tasks = tasks
        self.table = AttendTable((tasks.view(MAX_BLOCKS, _TASK_SIZE),))
        most = num_instances * room
        self.history = RowList(words, room)  # from the pool into the own block
        self.kept = RowList(words, most)  # from all blocks into the pool
        self.keys = RowList(words, most, has_targets=False)  # from all blocks, by prompt and position

    def fill(self, step: AttentionStep, inputs: StepInputs) -> None:
        """Write a step, on the host.

        Rows after it belong to no prompt, and their KV is neither sent nor kept.
        """
        self._rows.zero_()
        self.new_rows.fill_(-1)
        num_rows = len(inputs.token_ids)
        self.token_ids[:num_rows] = inputs.token_ids
        self.positions[:num_rows] = inputs.positions
        self.lengths[:num_rows] = inputs.lengths
        own = own_rows(step)
        self.new_rows[: len(own.new_rows)] = own.new_rows
        self.history.fill(own.history_slots, own.history_rows)
        kept = [
            (source_id * self.room + rows, slots)
            for source_id in step.batch.group.instance_ids
            for rows, slots in (kept_rows(step, source_id),)
        ]
        self.kept.fill(*(torch.cat(parts) for parts in zip(*kept, strict=True)))
        self._list_keys(step)

    def copy_from(self, host: "RingInputs") -> None:
        """Take the inputs of a step from the host."""
        self._rows.copy_(host._rows, non_blocking=True)
        for mine, theirs in ((self.history, host.history), (self.kept, host.kept), (self.keys, host.keys)):
            mine.copy_from(theirs)

    def _list_keys(self, step: AttentionStep) -> None:
        """List all KV of each own prompt by position, so that a block attends it in one task."""
        parts = {i: parts_of(step, i) for i in step.batch.group.instance_ids}
        tasks: list[int] = []
        first = 0
        for request_id in dict.fromkeys(block.request_id for block in step.blocks):
            num_keys = self._list_keys_of(step, request_id, parts, first)
            for block in step.blocks:
                if block.request_id == request_id:
                    for task in tasks_of(block, step.rows[block].start, first, (range(num_keys),)):
                        tasks.extend(task)
            first += num_keys
        self.keys.count.fill_(first)
        set_first(self._tasks, tasks)

    def _list_keys_of(
        self,
        step: AttentionStep,
        request_id: RequestId,
        parts: Mapping[InstanceId, Mapping[RequestId, slice]],
        first: int,
    ) -> int:
        """Write the source of each of a request's keys, from key `first` on; return their number."""
        key_rows, num_keys = self.keys.sources.numpy()[first:], 0
        for source_id, its_parts in parts.items():
            row = source_id * self.room + its_parts[request_id].start
            for positions in step.kv_on(source_id, request_id):
                rows = np.arange(row, row + len(positions))
                key_rows[positions.start : positions.stop : positions.step] = rows
                row += len(rows)
                num_keys += len(rows)
        return num_keys


def num_brought(step: AttentionStep) -> Mapping[InstanceId, int]:
    """Return the rows that each member sends in a step in which only KV travels: at least one."""
    return {i: max(1, num_rows_of(step, i)) for i in step.batch.group.instance_ids}
