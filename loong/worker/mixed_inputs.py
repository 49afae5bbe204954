"""What captured steps of prompts and decodes read: memory taken once, and filled for each step."""

from collections.abc import Iterator
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from loong.attention.pool import PoolAttention, Singles
from loong.attention.step import Step
from loong.kernels.attend_task import AttendTask
from loong.kernels.slots import SlotLists
from loong.model.device import AttendTable
from loong.worker.decode_state import set_first

STEP_SIZES = (16, 32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)  # rows
_MAX_SIZE = STEP_SIZES[-1]
_MAX_DECODES = 512
_MAX_PROMPTS = 64
_LEAST_COPIED = 256  # rows: with so many it pays to copy the prompts' keys out of the pool first
_KEYS_A_ROW = 2  # of what is copied: behind longer histories GPUs work longer than hosts launch
_TASK_SIZE = len(AttendTask._fields)
_PARTS = [4 * _MAX_SIZE, 2 * _MAX_DECODES, _MAX_DECODES + 2, _MAX_PROMPTS * _TASK_SIZE]  # in words
_NUM_FIXED = sum(_PARTS)


class MixedInputs:
    """Parts of one piece of memory, so that one copy fills all of them.

    `memory` is int64 [num_words(num_slots)]. Rows are the tokens of a step. A block of one token is a decode,
    others are prompts, of which the first tokens may have been computed before.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        columns, decodes, ends, tasks = torch.split(memory[:_NUM_FIXED], _PARTS)
        self.token_ids, self.positions, self.lengths, self.new_slots = columns.view(4, -1)
        self._decode_rows, self._decode_starts = decodes.view(2, -1)
        self._cu_seqlens = ends.view(torch.int32)[: _MAX_DECODES + 1]
        self._tasks = tasks
        self._slots = memory[_NUM_FIXED:]  # of the prompts' keys, then of the decodes'

    @staticmethod
    def num_words(num_slots: int) -> int:
        """The size of its memory, for lists of so many slots."""
        return _NUM_FIXED + max(num_slots, _KEYS_A_ROW * _MAX_SIZE)

    def size_for(self, step: Step) -> int | None:
        """The least size that has room for a step of this instance alone; None if there is none."""
        prompts = [block.positions for block in step.blocks if len(block.positions) > 1]
        num_decodes = len(step.blocks) - len(prompts)
        num_rows = sum(map(len, prompts)) + num_decodes
        num_prompt_keys = sum(positions.stop for positions in prompts)
        num_keys = sum(block.positions.stop for block in step.blocks)
        if len(prompts) > _MAX_PROMPTS or num_decodes > _MAX_DECODES or num_keys > len(self._slots):
            return None
        size = next((size for size in STEP_SIZES if size >= num_rows), None)
        if size is not None and _is_copied(size) and num_prompt_keys > _KEYS_A_ROW * size:
            return None
        return size

    def fill(self, step: Step, token_ids: Tensor, positions: Tensor, lengths: Tensor) -> int:
        """Take in a step, on the host, and return how many words of memory it takes; columns are of its rows.

        Rows beyond are of no prompt and no decode, and nothing is stored of them.
        """
        self.memory[:_NUM_FIXED].zero_()
        self.new_slots.fill_(-1)
        self._decode_rows.fill_(-1)
        num_rows = len(token_ids)
        self.token_ids[:num_rows] = token_ids
        self.positions[:num_rows] = positions
        self.lengths[:num_rows] = lengths
        spans = list(_spans(step))
        torch.cat([span.slots[span.positions.start :] for span in spans], out=self.new_slots[:num_rows])
        prompts, decodes = ([span for span in spans if span.is_prompt is kind] for kind in (True, False))
        ends = list(accumulate((len(span.slots) for span in (*prompts, *decodes)), initial=0))
        torch.cat([span.slots for span in (*prompts, *decodes)], out=self._slots[: ends[-1]])
        tasks = [
            AttendTask.causal(span.row, span.positions, start, range(len(span.slots)))
            for span, start in zip(prompts, ends, strict=False)
        ]
        set_first(self._tasks, [*chain.from_iterable(tasks)])
        starts = ends[len(prompts) :]
        set_first(self._decode_rows, [span.row for span in decodes])
        set_first(self._decode_starts, starts[:-1])
        set_first(self._cu_seqlens, [start - starts[0] for start in starts])
        self._cu_seqlens[len(starts) :] = starts[-1] - starts[0]
        return _NUM_FIXED + ends[-1]

    def attention(self, size: int, *, has_decodes: bool) -> PoolAttention:
        """What the rows of a step of this size attend, in which there may be decodes."""
        num_decodes = min(size, _MAX_DECODES)
        lists = SlotLists(self._slots, self._decode_starts[:num_decodes], self._cu_seqlens[: num_decodes + 1])
        is_copied = _is_copied(size)
        return PoolAttention(
            Singles(self._decode_rows[:num_decodes], lists) if has_decodes else None,
            self._slots[: _KEYS_A_ROW * size] if is_copied else self._slots,
            (AttendTable(self._tasks.view(-1, _TASK_SIZE)),),
            is_copied,
        )


class _Span(NamedTuple):
    """The rows of one block, from `row` on, and the slots [n] of all they see."""

    positions: range
    row: int
    slots: Tensor

    @property
    def is_prompt(self) -> bool:
        return len(self.positions) > 1


def _spans(step: Step) -> Iterator[_Span]:
    row = 0
    for block in step.blocks:
        slots = step.store.slots(block.request_id, range(block.positions.stop))
        yield _Span(block.positions, row, slots)
        row += len(block.positions)


def _is_copied(size: int) -> bool:
    return size >= _LEAST_COPIED
