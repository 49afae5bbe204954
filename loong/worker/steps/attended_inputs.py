"""The keys that queries of a captured step attend here, in layers of one kind: tasks, and lists of slots."""

from collections.abc import Iterator
from enum import Enum
from itertools import accumulate, chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep, within
from loong.attention.local import tasks_of
from loong.attention.pool import Keys, KeysCopied, KeysInPool, PoolAttention, Singles
from loong.attention.shared import SharedReaders, readers_of
from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.plan import BatchPlan, QueryBlock
from loong.core.request import RequestId
from loong.core.shared_kv import MAX_GROUPS, MAX_LEVELS
from loong.kernels.attend_task import AttendTask
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.device import AttendTable
from loong.worker.steps.decode_state import set_first

MAX_PROMPT_BLOCKS = 64  # that an instance attends
MAX_DECODES = 512
MAX_ROUNDS = 2  # of tasks, where KV is spread: a block's history, and its new KV
_TASK_SIZE = len(AttendTask._fields)
_TABLE_SIZE = MAX_PROMPT_BLOCKS * _TASK_SIZE
# in words, even: the part after it stays aligned for kernels
_PARTS = [
    *(2 * MAX_DECODES, MAX_DECODES + 2, MAX_ROUNDS * _TABLE_SIZE, 2),
    *(MAX_DECODES, MAX_GROUPS * _TASK_SIZE),
]
_NUM_FIXED = sum(_PARTS)


class PromptKeys(Enum):
    """The ways in which a step attends the keys of prompts."""

    FEW = "copied out of the pool first, into a row: no more than some for each query"
    MANY = "copied out of the pool first, into a row, and cut into pieces"
    IN_POOL = "by their slots, and cut into pieces"


class Filled(NamedTuple):
    """A step in memory: its words, and whether requests read KV together."""

    num_words: int
    is_shared: bool


class AttendedInputs:
    """Parts of one piece of memory, int64 [num_words(num_slots)], for layers with a `window`; None: others.

    Queries are those that this instance attends: in a group, row t of instance i is query i * size + t.
    """

    def __init__(self, memory: Tensor, limits: CudaGraphLimits, window: int | None) -> None:
        self._memory, self._limits, self._window = memory, limits, window
        decodes, ends, self._tasks, counts, *shared = torch.split(memory[:_NUM_FIXED], _PARTS)
        self._readers, self._shared_tasks = shared
        self._num_keys = counts[:1]  # of the prompts
        self._decode_rows, self._decode_starts = decodes.view(2, -1)
        self._cu_seqlens = ends.view(torch.int32)[: MAX_DECODES + 1]
        self._slots = memory[_NUM_FIXED:]  # of keys that prompts read alone, then decodes, then groups

    @staticmethod
    def num_words(num_slots: int, limits: CudaGraphLimits) -> int:
        """Return the size of its memory, for a group with KV of `num_slots` tokens."""
        return _NUM_FIXED + limits.num_listed(num_slots)

    @property
    def max_num_keys(self) -> int:
        """Return the most keys that a step lists."""
        return len(self._slots)

    def fill(self, step: AttentionStep, size: int, num_instances: int) -> Filled:
        """Write a step, as these layers see it, on the host, for a graph of this size and as many instances.

        Rows after it belong to no prompt or decode.
        """
        self._memory[:_NUM_FIXED].zero_()
        for rows in (self._decode_rows, self._readers):
            rows.fill_(-1)
        prompts: list[_Attended] = []
        decodes: list[_Attended] = []
        for one in _attended(step, size):
            (decodes if is_decode(step.batch, one.block) else prompts).append(one)
        room = _num_readers(size, num_instances)
        readers = self._readers_of(step, prompts, decodes, room, 1 if num_instances == 1 else MAX_ROUNDS)
        kv = {i: readers.alone(i, one.kv) for one in (*prompts, *decodes) for i in (one.block.request_id,)}
        ends = list(accumulate([sum(map(len, pieces)) for pieces in kv.values()], initial=0))
        first_decode = len(ends) - 1 - len(decodes)
        self._num_keys.fill_(ends[first_decode])
        shared = readers.listed
        alone = [(i, positions) for i, pieces in kv.items() for positions in pieces]
        step.store.list_slots([*alone, *shared], self._slots)
        starts = dict(zip(kv, ends, strict=False))
        self._list_tasks([self._tasks_of(one, readers, starts[one.block.request_id]) for one in prompts])
        self._list_decodes([one.query_row for one in decodes], ends[first_decode:])
        self._list_shared(readers, [*prompts, *decodes], room, ends[-1])
        num_words = _NUM_FIXED + ends[-1] + readers.num_listed
        return Filled(num_words, readers.is_reading)

    def attention(
        self, size: int, num_instances: int, prompt_keys: PromptKeys, *, has_decodes: bool, is_shared: bool
    ) -> PoolAttention:
        """Return the attention of a step's queries here.

        There may be decodes among them if it `has_decodes`; requests read KV together if it `is_shared`.
        """
        num_decodes = _num_readers(size, num_instances)
        lists = SlotLists(self._slots, self._decode_starts[:num_decodes], self._cu_seqlens[: num_decodes + 1])
        tables = self._tasks.view(MAX_ROUNDS, MAX_PROMPT_BLOCKS, _TASK_SIZE)
        is_cut = prompt_keys is not PromptKeys.FEW
        return PoolAttention(
            Singles(self._decode_rows[:num_decodes], lists) if has_decodes else None,
            self._keys(size, prompt_keys),
            tuple(
                AttendTable((t,), is_cut=is_cut, window=self._window)
                for t in (tables if num_instances > 1 else tables[:1])
            ),
            self._shared(num_decodes) if is_shared else None,
        )

    def _shared(self, num_readers: int) -> SharedTable:
        tasks = self._shared_tasks.view(MAX_GROUPS, _TASK_SIZE)
        return SharedTable(self._readers[:num_readers], MAX_LEVELS, tasks, self._slots)

    def _keys(self, size: int, prompt_keys: PromptKeys) -> Keys:
        if prompt_keys is PromptKeys.IN_POOL:
            return KeysInPool(self._slots)
        if prompt_keys is PromptKeys.MANY:
            return KeysCopied(self._slots[: self._limits.most_copied], self._num_keys)
        return KeysCopied(self._slots[: self._limits.keys_a_row * size])

    def _readers_of(
        self,
        step: AttentionStep,
        prompts: "list[_Attended]",
        decodes: "list[_Attended]",
        room: int,
        num_rounds: int,
    ) -> SharedReaders:
        """Return what requests read together: decodes only, if the rest of a prompt takes too many rounds."""
        readers = readers_of(step, [one.block for one in (*decodes, *prompts)], (step.instance_id,), room)
        if readers.is_reading and any(len(self._tasks_of(one, readers, 0)) > num_rounds for one in prompts):
            return readers_of(step, [one.block for one in decodes], (step.instance_id,), room)
        return readers

    def _tasks_of(self, one: "_Attended", readers: SharedReaders, first_key: int) -> tuple[AttendTask, ...]:
        """Return the tasks of a prompt over what it reads alone."""
        alone = readers.alone(one.block.request_id, one.kv)
        return tasks_of(one.block, one.query_row, first_key, alone, self._window)

    def _list_tasks(self, tasks: list[tuple[AttendTask, ...]]) -> None:
        for number, tasks_now in enumerate(zip_longest(*tasks)):
            lines = chain.from_iterable(task for task in tasks_now if task is not None)
            set_first(self._tasks[number * _TABLE_SIZE :], list(lines))

    def _list_decodes(self, query_rows: list[int], starts: list[int]) -> None:
        """Write the `starts` of the decodes' slots, and their ends."""
        set_first(self._decode_rows, query_rows)
        set_first(self._decode_starts, starts[:-1])
        set_first(self._cu_seqlens, [start - starts[0] for start in starts])
        self._cu_seqlens[len(starts) :] = starts[-1] - starts[0]

    def _list_shared(
        self, readers: SharedReaders, attended: "list[_Attended]", rows_of_level: int, first_key: int
    ) -> None:
        """Write the rows that read together, and their tasks."""
        rows: dict[RequestId, list[int]] = {request_id: [] for request_id in readers.ordered_ids}
        for one in attended if rows else ():
            if (its := rows.get(one.block.request_id)) is not None:
                its += range(one.query_row, one.query_row + len(one.block.positions))
        set_first(self._readers, list(chain.from_iterable(rows.values())))
        tasks = readers.tasks(list(map(len, rows.values())), rows_of_level, first_key)
        set_first(self._shared_tasks, list(chain.from_iterable(tasks)))


def _num_readers(size: int, num_instances: int) -> int:
    """Return the most decodes, or queries that read together, that an instance attends in a step."""
    return min(num_instances * size, MAX_DECODES)


def is_decode(batch: BatchPlan, block: QueryBlock) -> bool:
    """Return whether a block is one token, and all that the batch computes of its request."""
    return len(block.positions) == 1 and len(batch.blocks_of(block.request_id)) == 1


class _Attended(NamedTuple):
    """The keys that a block attends here, at the positions `kv`. `query_row` is its first row.

    Blocks of one request attend the same keys, which are listed and copied once for all.
    """

    block: QueryBlock
    query_row: int
    kv: tuple[range, ...]


def _attended(step: AttentionStep, size: int) -> Iterator[_Attended]:
    num_rows = dict.fromkeys(step.batch.group.instance_ids, 0)
    known: dict[RequestId, tuple[range, ...]] = {}
    is_alone = step.batch.group.dop == 1
    for block in step.batch.queries:
        request_id, row = block.request_id, num_rows[block.master_id]
        num_rows[block.master_id] += len(block.positions)
        if is_alone:  # all of it is here, and in one piece
            first = step.batch.blocks_of(request_id)[0].positions[0]
            yield _Attended(block, row, within(step.window, first, (range(block.positions.stop),)))
            continue
        if request_id not in known:
            known[request_id] = step.keys_of(request_id)
        if kv := known[request_id]:
            yield _Attended(block, block.master_id * size + row, kv)
