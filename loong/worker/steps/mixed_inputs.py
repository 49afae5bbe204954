"""The inputs of captured steps of prompts and decodes: memory allocated once, and filled for each step."""

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import accumulate, chain, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.local import tasks_of
from loong.attention.pool import Keys, KeysCopied, KeysInPool, PoolAttention, Singles
from loong.attention.shared import SharedReaders
from loong.core.cost.cuda_graph_limits import CudaGraphLimits
from loong.core.cost.work import WorkCount
from loong.core.errors import ConfigError
from loong.core.plan import BatchPlan, QueryBlock
from loong.core.positions import coalesce
from loong.core.request import RequestId
from loong.core.shared_kv import MAX_GROUPS, MAX_LEVELS
from loong.kernels.attend_task import AttendTask
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.device import AttendTable
from loong.worker.steps.decode_state import set_first
from loong.worker.steps.step_inputs import StepInputs

MAX_ROWS = 2048  # of an instance in a step
GROUP_STEP_SIZES = (  # rows of a master in a step of a group
    *(16, 32, 64, 128, 256, 384, 512, 640, 768, 896),
    *(1024, 1152, 1280, 1536, 1792, MAX_ROWS),
)
MAX_PROMPT_BLOCKS = 64  # that an instance attends
_MAX_DECODES = 512
_MAX_ROUNDS = 2  # of tasks, where KV is spread: a block's history, and its new KV
_TASK_SIZE = len(AttendTask._fields)
_TABLE_SIZE = MAX_PROMPT_BLOCKS * _TASK_SIZE
# in words, even: the part after it stays aligned for kernels
_PARTS = [
    *(4 * MAX_ROWS, 2 * _MAX_DECODES, _MAX_DECODES + 2, _MAX_ROUNDS * _TABLE_SIZE, 2),
    *(_MAX_DECODES, MAX_GROUPS * _TASK_SIZE),
]
_NUM_FIXED = sum(_PARTS)


class PromptKeys(Enum):
    """The ways in which a step attends the keys of prompts."""

    FEW = "copied out of the pool first, into a row: no more than some for each query"
    MANY = "copied out of the pool first, into a row, and cut into pieces"
    IN_POOL = "by their slots, and cut into pieces"


class MixedInputs:
    """Parts of one piece of memory, so that one copy fills all of them.

    `memory` is int64 [num_words(num_slots)]. Rows are the tokens of a step of which this instance is the
    master, queries those that it attends: in a group, row t of instance i is query i * size + t.
    """

    def __init__(self, memory: Tensor, limits: CudaGraphLimits) -> None:
        """Divide `memory`. Raises `ConfigError` if it has no room for steps within the `limits`."""
        _check_room(limits)
        self.memory, self._limits = memory, limits
        columns, decodes, ends, self._tasks, counts, *shared = torch.split(memory[:_NUM_FIXED], _PARTS)
        self._readers, self._shared_tasks = shared
        self._num_keys = counts[:1]  # of the prompts
        self.token_ids, self.positions, self.lengths, self.new_slots = columns.view(4, -1)
        self._decode_rows, self._decode_starts = decodes.view(2, -1)
        self._cu_seqlens = ends.view(torch.int32)[: _MAX_DECODES + 1]
        self._slots = memory[_NUM_FIXED:]  # of the prompts' keys, of the decodes', of what decodes share

    @staticmethod
    def num_words(num_slots: int, limits: CudaGraphLimits) -> int:
        """Return the size of its memory, for a group with KV of `num_slots` tokens."""
        return _NUM_FIXED + limits.num_listed(num_slots)

    def prompt_keys(self, step: AttentionStep, num_rows: int) -> PromptKeys | None:
        """Return how all members attend in a step of up to `num_rows` rows a master; all find the same.

        None if it has no room on one of them, or is faster when launched by the host (`CudaGraphLimits`).
        """
        batch, count = step.batch, WorkCount(step.batch.group.instance_ids)
        num_decodes = most_keys = 0
        for request_id in batch.request_ids:
            blocks = batch.blocks_of(request_id)
            most_keys += len(blocks) * (1 + max(block.positions[-1] for block in blocks))
            if is_decode(batch, blocks[0]):
                num_decodes += 1
                count.instances[blocks[0].master_id].num_tokens += 1  # its other counts are not needed
            elif _has_few_rounds(step, request_id):
                count.add(blocks, batch.writes_of(request_id), step.placements[request_id])
            else:
                return None
        if most_keys > len(self._slots):
            return None
        works, limits = count.instances.values(), self._limits
        if num_decodes > _MAX_DECODES or not all(map(limits.has, works)):
            return None
        if all(limits.has_few_keys(work, num_rows) for work in works):
            return PromptKeys.FEW
        if num_rows < limits.least_copied or all(map(limits.has_few_queries, works)):
            return PromptKeys.IN_POOL
        is_too_long = any(work.num_keys > limits.most_copied for work in works)
        return PromptKeys.IN_POOL if is_too_long else PromptKeys.MANY

    def ways(self, size: int) -> tuple[PromptKeys, ...]:
        """Return how steps of `size` rows may attend the keys of prompts, the usual way first."""
        return tuple(PromptKeys) if size >= self._limits.least_copied else (PromptKeys.IN_POOL,)

    def fill(self, step: AttentionStep, size: int, num_instances: int, inputs: StepInputs) -> "Filled":
        """Write a step, on the host, for a graph of this size and as many instances.

        Rows after it belong to no prompt or decode, and store nothing.
        """
        self.memory[:_NUM_FIXED].zero_()
        for rows in (self.new_slots, self._decode_rows, self._readers):
            rows.fill_(-1)
        num_rows = len(inputs.token_ids)
        self.token_ids[:num_rows] = inputs.token_ids
        self.positions[:num_rows] = inputs.positions
        self.lengths[:num_rows] = inputs.lengths
        step.store.list_slots([(b.request_id, b.positions) for b in step.blocks], self.new_slots)
        prompts: list[_Attended] = []
        decodes: list[_Attended] = []
        for one in _attended(step, size):
            (decodes if is_decode(step.batch, one.block) else prompts).append(one)
        readers = _readers_of(step, decodes)
        kv = {one.block.request_id: one.kv for one in prompts}
        kv |= {i: readers.alone(i, one.kv) for one in decodes for i in (one.block.request_id,)}
        ends = list(accumulate([sum(map(len, pieces)) for pieces in kv.values()], initial=0))
        first_decode = len(ends) - 1 - len(decodes)
        self._num_keys.fill_(ends[first_decode])
        shared = readers.listed
        alone = [(i, positions) for i, pieces in kv.items() for positions in pieces]
        step.store.list_slots([*alone, *shared], self._slots)
        self._list_tasks(prompts, dict(zip(kv, ends, strict=False)))
        self._list_decodes([one.query_row for one in decodes], ends[first_decode:])
        rows = {one.block.request_id: one.query_row for one in decodes}
        self._list_shared(readers, rows, _num_decodes(size, num_instances), ends[-1])
        num_words = _NUM_FIXED + ends[-1] + sum([len(positions) for _, positions in shared])
        return Filled(num_words, readers.is_reading)

    def attention(
        self, size: int, num_instances: int, prompt_keys: PromptKeys, *, has_decodes: bool, is_shared: bool
    ) -> PoolAttention:
        """Return the attention of a step's queries here.

        There may be decodes among them if it `has_decodes`; they read KV together if it `is_shared`.
        """
        num_decodes = _num_decodes(size, num_instances)
        lists = SlotLists(self._slots, self._decode_starts[:num_decodes], self._cu_seqlens[: num_decodes + 1])
        tables = self._tasks.view(_MAX_ROUNDS, MAX_PROMPT_BLOCKS, _TASK_SIZE)
        is_cut = prompt_keys is not PromptKeys.FEW
        return PoolAttention(
            Singles(self._decode_rows[:num_decodes], lists) if has_decodes else None,
            self._keys(size, prompt_keys),
            tuple(AttendTable((t,), is_cut=is_cut) for t in (tables if num_instances > 1 else tables[:1])),
            self._shared(num_decodes) if is_shared else None,
        )

    def _shared(self, num_decodes: int) -> SharedTable:
        tasks = self._shared_tasks.view(MAX_GROUPS, _TASK_SIZE)
        return SharedTable(self._readers[:num_decodes], MAX_LEVELS, tasks, self._slots)

    def _keys(self, size: int, prompt_keys: PromptKeys) -> Keys:
        if prompt_keys is PromptKeys.IN_POOL:
            return KeysInPool(self._slots)
        if prompt_keys is PromptKeys.MANY:
            return KeysCopied(self._slots[: self._limits.most_copied], self._num_keys)
        return KeysCopied(self._slots[: self._limits.keys_a_row * size])

    def _list_tasks(self, prompts: "list[_Attended]", starts: Mapping[RequestId, int]) -> None:
        tasks = [tasks_of(p.block, p.query_row, starts[p.block.request_id], p.kv) for p in prompts]
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
        self, readers: SharedReaders, rows: Mapping[RequestId, int], rows_of_level: int, first_key: int
    ) -> None:
        """Write the rows that read together, and their tasks."""
        ordered = readers.ordered_ids
        set_first(self._readers, [rows[request_id] for request_id in ordered])
        tasks = readers.tasks([1] * len(ordered), rows_of_level, first_key)
        set_first(self._shared_tasks, list(chain.from_iterable(tasks)))


class Filled(NamedTuple):
    """A step in memory: its words, and whether decodes read KV together."""

    num_words: int
    is_shared: bool


def _num_decodes(size: int, num_instances: int) -> int:
    """Return the most decodes that an instance attends in a step."""
    return min(num_instances * size, _MAX_DECODES)


def _readers_of(step: AttentionStep, decodes: "list[_Attended]") -> SharedReaders:
    firsts = {one.block.request_id: one.block.positions.start for one in decodes}
    return SharedReaders.of(step.instance_id, step.placements, firsts, step.least_saved)


def _check_room(limits: CudaGraphLimits) -> None:
    """Raise `ConfigError` unless workers can capture steps within the `limits`."""
    for name, room in (("most_rows", MAX_ROWS), ("most_prompts", MAX_PROMPT_BLOCKS)):
        if (asked := getattr(limits, name)) > room:
            raise ConfigError(f"graph_limits.{name} is {asked}, but workers have room for {room}")


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
            yield _Attended(block, row, (range(block.positions.stop),))
            continue
        if request_id not in known:
            known[request_id] = step.keys_of(request_id)
        if kv := known[request_id]:
            yield _Attended(block, block.master_id * size + row, kv)


def _has_few_rounds(step: AttentionStep, request_id: RequestId) -> bool:
    """Return whether each block of a request takes no more tasks than there are rounds, on every instance."""
    for instance_id in step.batch.group.instance_ids if step.batch.group.dop > 1 else ():
        kv = step.kv_on(instance_id, request_id)
        if len(kv) <= _MAX_ROUNDS or len(kv := coalesce(kv)) <= _MAX_ROUNDS:
            continue
        if any(len(tasks_of(block, 0, 0, kv)) > _MAX_ROUNDS for block in step.batch.blocks_of(request_id)):
            return False
    return True
