"""The inputs and state of captured decode steps: memory allocated once, and filled when a lease begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from loong.attention.shared import NO_READERS, SharedReaders
from loong.core.instance import MAX_SERVED_TOKENS
from loong.core.placement import InstanceId
from loong.core.request import RequestId, SamplingParams, TokenId
from loong.core.shared_kv import MAX_GROUPS, MAX_LEVELS
from loong.kernels.attend_task import AttendTask
from loong.kernels.sampling.draw_params import DrawParams
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.device import Device
from loong.worker.kv.pool import KVPool
from loong.worker.sampling.random_sampling import draw_params
from loong.worker.steps.step_inputs import PendingTokenIds

GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, MAX_SERVED_TOKENS)  # tokens of a master in a step of a group
BATCH_SIZES = (*GROUP_SIZES[:-1], 160, 192, 256, 320, 384, 512)  # of an instance alone
_MAX_SIZE = BATCH_SIZES[-1]
_NUM_COLUMNS = 3 + len(DrawParams._fields)
_TASK_SIZE = len(AttendTask._fields)
_NUM_FIXED = _NUM_COLUMNS * _MAX_SIZE + MAX_GROUPS * _TASK_SIZE


Held: TypeAlias = tuple[RequestId, tuple[range, ...]]  # positions whose KV an instance has


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One request as a lease begins, at its master: `token_id` is at `position`, after all its KV.

    `held` is its KV here that it reads alone, and `free` the positions that it may still compute, which have
    slots.
    """

    token_id: TokenId
    position: int
    held: Held
    free: range
    params: SamplingParams


class Whole(NamedTuple):
    """The position of a request's first query in a lease, and all its KV here from before, shared or not."""

    position: int
    held: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class LeaseBatch:
    """A lease as it begins on one instance.

    `rows` are the requests whose master it is. `peer_rows` has, for each other member, the KV of its requests
    here, in the order of its rows. `holder_ids` are the instances that serve the lease. One of these is no
    member, so it has no rows. `shared` is what requests read together here. `whole` is for layers with a
    window, in which they do not; empty if there are none.
    """

    instance_id: InstanceId
    rows: Sequence[DecodeRow]
    peer_rows: Mapping[InstanceId, Sequence[Held]]
    holder_ids: Sequence[InstanceId] = ()
    shared: SharedReaders = NO_READERS
    whole: Mapping[RequestId, Whole] = field(default_factory=dict)

    @property
    def is_exchanged(self) -> bool:
        """Return whether other instances take part."""
        return bool(self.peer_rows or self.holder_ids)

    @property
    def num_tokens(self) -> Mapping[InstanceId, int]:
        """Return the tokens of each member in a step."""
        own = {} if self.instance_id in self.holder_ids else {self.instance_id: len(self.rows)}
        return {**own, **{i: len(lists) for i, lists in self.peer_rows.items()}}

    @property
    def size(self) -> int:
        """Return the least batch size that has room for the tokens of any member."""
        largest = max(self.num_tokens.values())
        return next(size for size in (GROUP_SIZES if self.is_exchanged else BATCH_SIZES) if size >= largest)

    @property
    def first_row(self) -> int:
        """Return the query of the first own row in a step."""
        return self.instance_id * self.size if self.is_exchanged else 0

    @property
    def listed(self) -> list[tuple[RequestId, range]]:
        """Return owners and positions of the slots that the lease attends here, in list order.

        Shared ones are first, so that other lists can grow.
        """
        found = self.shared.listed
        for row in self.rows:
            request_id, held = row.held
            found += [(request_id, positions) for positions in (*held, row.free)]
        for request_id, held in chain.from_iterable(self.peer_rows.values()):
            found += [(request_id, positions) for positions in held]
        return found

    def query_of(self) -> Mapping[RequestId, int]:
        """Return the query of each request in a step."""
        queries = {row.held[0]: self.first_row + number for number, row in enumerate(self.rows)}
        for instance_id, lists in self.peer_rows.items():
            first = instance_id * self.size
            queries.update({request_id: first + number for number, (request_id, _) in enumerate(lists)})
        return queries


class DecodeState:
    """Columns of one piece of memory, in a row's or a query's order, so that one copy fills all of them.

    Rows are the tokens of this instance, up to 512. Queries are those of all members that a step attends.
    `memory` is int64 [num_words(num_queries)].
    """

    def __init__(self, num_queries: int, memory: Tensor) -> None:
        self.memory = memory
        columns = self.memory[: _NUM_COLUMNS * _MAX_SIZE].view(_NUM_COLUMNS, _MAX_SIZE)
        self.tokens, self.positions = columns[0], columns[1]
        self.limits = columns[2]  # slots of each row's list, held and free: beyond, nothing is stored
        wide = columns.view(torch.float64)
        self.params = DrawParams(
            temperature=wide[3],
            top_k=columns[4],
            top_p=wide[5],
            min_p=wide[6],
            seed=columns[7],
            position=columns[8],
        )
        self.tasks = self.memory[columns.numel() : _NUM_FIXED].view(MAX_GROUPS, _TASK_SIZE)
        self.starts, self.num_keys, self.readers = self.memory[_NUM_FIXED:].view(3, num_queries)

    @staticmethod
    def num_words(num_queries: int) -> int:
        """Return the size of its memory."""
        return _NUM_FIXED + 3 * num_queries

    def fill(self, batch: LeaseBatch, num_queries: int, vocab_size: int) -> int:
        """Write a lease, on the host, whose steps have `num_queries` queries.

        Returns the number of listed slots.
        """
        first_row = batch.first_row
        self.memory.zero_()
        self.readers.fill_(-1)
        if readers := batch.shared.ordered_ids:
            queries = batch.query_of()
            set_first(self.readers, [queries[request_id] for request_id in readers])
            tasks = batch.shared.tasks([1] * len(readers), num_queries)
            set_first(self.tasks.view(-1), list(chain.from_iterable(tasks)))
        rows = batch.rows
        positions = [row.position for row in rows]
        set_first(self.tokens, [row.token_id for row in rows])
        set_first(self.positions, positions)
        params = draw_params([row.params for row in rows], [p + 1 for p in positions], vocab_size)
        for column, values in zip(self.params, params, strict=True):
            column[: len(rows)] = values
        set_first(self.num_keys[first_row:], [_num_keys(row.held) for row in rows])
        for instance_id, lists in batch.peer_rows.items():
            set_first(self.num_keys[instance_id * batch.size :], list(map(_num_keys, lists)))
        return self.list_slots(batch)

    def list_slots(self, batch: LeaseBatch) -> int:
        """Write where each list of slots begins, and how long those of rows are; otherwise as `fill`."""
        first_row, num_shared = batch.first_row, sum([len(positions) for _, positions in batch.shared.listed])
        limits = [_num_keys(row.held) + len(row.free) for row in batch.rows]
        set_first(self.limits, limits)
        ends = list(accumulate(limits, initial=num_shared))
        set_first(self.starts[first_row:], ends[:-1])
        for instance_id, lists in batch.peer_rows.items():
            ends = list(accumulate(map(_num_keys, lists), initial=ends[-1]))
            set_first(self.starts[instance_id * batch.size :], ends[:-1])
        return ends[-1]


class LeaseTables:
    """The inputs of a lease's steps on the device, up to `num_queries` queries and `num_slots` listed slots.

    Copies on the host are allocated once, since allocation takes milliseconds.
    """

    def __init__(self, pool: KVPool, num_queries: int, num_slots: int, device: Device) -> None:
        new, num_words = partial(torch.zeros, device=device.torch_device), DecodeState.num_words(num_queries)
        self._pool = pool
        self.state = DecodeState(num_queries, new(num_words, dtype=torch.int64))
        self.slots = new(num_slots, dtype=torch.int64)
        self._cu_seqlens = new(num_queries + 1, dtype=torch.int32)
        self._host = DecodeState(num_queries, device.host_words(num_words))
        self._host_slots = device.host_words(num_slots)

    def begin(
        self,
        batch: LeaseBatch,
        num_queries: int,
        vocab_size: int,
        pending_ids: PendingTokenIds | None = None,
    ) -> None:
        """Set the rows and the `num_queries` queries of a lease.

        `pending_ids` are tokens that are still to be sampled.
        """
        num_slots = self._host.fill(batch, num_queries, vocab_size)
        self.state.memory.copy_(self._host.memory, non_blocking=True)
        if pending_ids is not None:
            pending_ids.fill(self.state.tokens)
        self._copy_slots(batch, num_slots)

    def lengthen(self, batch: LeaseBatch) -> None:
        """Set the lists of slots to those of `batch`, the same lease with more of them."""
        num_slots = self._host.list_slots(batch)
        self.state.limits.copy_(self._host.limits, non_blocking=True)
        self.state.starts.copy_(self._host.starts, non_blocking=True)
        self._copy_slots(batch, num_slots)

    def lists(self, num_queries: int) -> SlotLists:
        """Return the lists of slots of the first queries, as long as their present numbers of keys."""
        cu_seqlens = self._cu_seqlens[: num_queries + 1]
        cu_seqlens[1:].copy_(self.state.num_keys[:num_queries].cumsum(0))
        return SlotLists(self.slots, self.state.starts[:num_queries], cu_seqlens)

    def shared(self, num_queries: int) -> SharedTable:
        """Return what several of the first queries read together."""
        return SharedTable(self.state.readers[:num_queries], MAX_LEVELS, self.state.tasks, self.slots)

    def _copy_slots(self, batch: LeaseBatch, num_slots: int) -> None:
        self._pool.list_slots(batch.listed, self._host_slots)
        self.slots[:num_slots].copy_(self._host_slots[:num_slots], non_blocking=True)


def _num_keys(held: Held) -> int:
    return sum(map(len, held[1]))


def set_first(column: Tensor, values: Sequence[int]) -> None:
    """Write the first elements; for few, NumPy is faster than torch."""
    column.numpy()[: len(values)] = values
