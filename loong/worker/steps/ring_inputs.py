"""The inputs of captured steps in which KV travels: memory allocated once, and filled for each step."""

from collections.abc import Mapping

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

MAX_KV_ROWS = 4096
KV_SIZES = (*GROUP_STEP_SIZES, 2560, 3072, 3584, MAX_KV_ROWS)  # rows that a member makes, or brings
MAX_BLOCKS = 64  # of prompts, of one master
_TASK_SIZE = len(AttendTask._fields)


class RingInputs:
    """Parts of one piece of memory, so that one copy fills all of them.

    `memory` is int64 [num_words(num_instances)]. Rows of a step are the tokens of which this instance is the
    master. Each member sends a block of KV, whose rows are those of `OwnRows`; row r of instance i is row i *
    size + r of all.
    """

    def __init__(self, memory: Tensor, num_instances: int) -> None:
        self.memory = memory
        columns, sources, tasks = torch.split(memory, _parts(num_instances))
        (
            self.token_ids,
            self.positions,
            self.lengths,
            self.new_rows,  # of the own block
            self.history_rows,  # of the own block, or -1
            self.history_slots,
        ) = columns.view(6, -1)
        self.key_rows, self.kept_slots = sources.view(2, -1)  # -1 in the slots: not kept
        self.table = AttendTable(tasks.view(MAX_BLOCKS, _TASK_SIZE))

    @staticmethod
    def num_words(num_instances: int) -> int:
        """Return the size of its memory."""
        return sum(_parts(num_instances))

    def fill(self, step: AttentionStep, size: int, inputs: StepInputs) -> None:
        """Write a step, on the host.

        Rows after it belong to no prompt, and their KV is neither sent nor kept.
        """
        self.memory.zero_()
        for absent in (self.new_rows, self.history_rows, self.kept_slots):
            absent.fill_(-1)
        num_rows = len(inputs.token_ids)
        self.token_ids[:num_rows] = inputs.token_ids
        self.positions[:num_rows] = inputs.positions
        self.lengths[:num_rows] = inputs.lengths
        own = own_rows(step)
        self.new_rows[: len(own.new_rows)] = own.new_rows
        self.history_slots[: len(own.history_slots)] = own.history_slots
        self.history_rows[: len(own.history_rows)] = own.history_rows
        for source_id in step.batch.group.instance_ids:
            rows, slots = kept_rows(step, source_id)
            self.kept_slots[source_id * size + rows] = slots
        self._list_keys(step, size)

    def _list_keys(self, step: AttentionStep, size: int) -> None:
        """List all KV of each own prompt by position, so that a block attends it in one task."""
        parts = {i: parts_of(step, i) for i in step.batch.group.instance_ids}
        tasks: list[int] = []
        first = 0
        for request_id in dict.fromkeys(block.request_id for block in step.blocks):
            num_keys = self._list_keys_of(step, request_id, size, parts, first)
            for block in step.blocks:
                if block.request_id == request_id:
                    for task in tasks_of(block, step.rows[block].start, first, (range(num_keys),)):
                        tasks.extend(task)
            first += num_keys
        set_first(self.table.tasks.view(-1), tasks)

    def _list_keys_of(
        self,
        step: AttentionStep,
        request_id: RequestId,
        size: int,
        parts: Mapping[InstanceId, Mapping[RequestId, slice]],
        first: int,
    ) -> int:
        """Write the source of each of a request's keys, from key `first` on; return their number."""
        key_rows, num_keys = self.key_rows.numpy()[first:], 0
        for source_id, its_parts in parts.items():
            row = source_id * size + its_parts[request_id].start
            for positions in step.kv_on(source_id, request_id):
                rows = np.arange(row, row + len(positions))
                key_rows[positions.start : positions.stop : positions.step] = rows
                row += len(rows)
                num_keys += len(rows)
        return num_keys


def num_brought(step: AttentionStep) -> Mapping[InstanceId, int]:
    """Return the rows that each member sends in a step in which only KV travels: at least one."""
    return {i: max(1, num_rows_of(step, i)) for i in step.batch.group.instance_ids}


def _parts(num_instances: int) -> list[int]:
    """Return the sizes of the parts, in words."""
    return [6 * MAX_KV_ROWS, 2 * num_instances * MAX_KV_ROWS, MAX_BLOCKS * _TASK_SIZE]
