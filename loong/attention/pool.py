"""Attention of queries over the KV in this instance's pool."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep, concatenate, within
from loong.attention.local import tables_of, tasks_of
from loong.attention.shared import readers_of, shared_table
from loong.core.plan import QueryBlock
from loong.core.request import RequestId
from loong.kernels import Partial
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.device import AttendTable, Device

_LEAST_IN_ROW = 256  # queries; from here on consecutive keys are faster
MOST_COPIED = 1 << 18  # keys; about 1 GiB


@dataclass(frozen=True, slots=True)
class Singles:
    """Queries that are the only one of their request and see all its KV (decode)."""

    rows: Tensor  # [B] int64
    lists: SlotLists


class Keys(Protocol):
    """The place of the keys of some tables in a layer of the pool."""

    def found(self, kv: Tensor, device: Device) -> tuple[Tensor, Tensor | None]:
        """Return KV and slots for `attend_blocks`, given rows kv [S, ...] of the pool.

        Key row i of a table is row `slots[i]` of the KV returned, or row i without slots.
        """


@dataclass(frozen=True, slots=True)
class KeysInPool:
    """Keys in any slots of the pool."""

    slots: Tensor  # [N] int64

    def found(self, kv: Tensor, device: Device) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002 - see Keys
        """See Keys."""
        return kv, self.slots


@dataclass(frozen=True, slots=True)
class KeysInRow:
    """Keys in consecutive slots."""

    slots: slice

    def found(self, kv: Tensor, device: Device) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002 - see Keys
        """See Keys."""
        return kv[self.slots], None


@dataclass(frozen=True, slots=True)
class KeysCopied:
    """Keys in any slots of the pool, copied to consecutive rows first, which is faster for many queries."""

    slots: Tensor  # [N] int64
    num_keys: Tensor | None = None  # [1] int64, the number of slots in use; None: all

    def found(self, kv: Tensor, device: Device) -> tuple[Tensor, Tensor | None]:
        """See Keys."""
        row = kv.new_empty(len(self.slots), *kv.shape[1:])
        device.copy_rows(kv, row, source_rows=self.slots, target_rows=None, num_rows=self.num_keys)
        return row, None


@dataclass(frozen=True, slots=True)
class PoolAttention:
    """The attention of some queries in the pool. A query is in `singles` or in `tables`, never in both.

    It may be in `shared` as well, which has KV that is in neither.
    """

    singles: Singles | None
    keys: Keys  # of the tables
    tables: tuple[AttendTable, ...]
    shared: SharedTable | None = None

    @property
    def is_merged(self) -> bool:
        """Return whether some query attends in several calls, or in one that only returns partials."""
        is_in_several = len(self.tables) > 1 or any(table.is_merged for table in self.tables)
        return self.singles is not None or self.shared is not None or is_in_several

    def merge_into(self, total: Partial, q: Tensor, kv: Tensor, device: Device) -> None:
        """Merge attention of q [T, H, D] over a layer of the pool, kv [S, ...], into `total`."""
        scale = q.shape[-1] ** -0.5
        if self.shared is not None:
            device.attend_shared(q, kv, self.shared, scale=scale, total=total)
        if self.singles is not None:
            rows = self.singles.rows
            part = Partial.empty(len(rows), q.shape[1], q.shape[2], q.device)
            device.attend_slots(q[rows], kv, self.singles.lists, scale=scale, out=part)
            device.merge_into(total, Partial(part.out[None], part.lse[None]), rows)
        if self.tables:
            kv, slots = self.keys.found(kv, device)
            for table in self.tables:
                device.attend_blocks(q, kv, table, scale=scale, total=total, slots=slots)


def pool_attention(
    step: AttentionStep, blocks: Iterable[tuple[QueryBlock, int]], device: Device
) -> PoolAttention | None:
    """Return the attention of blocks, given with their first rows, in this instance's pool; None for no
    blocks.

    Blocks of one request see the same KV, which is listed once for all of them. What several requests see is
    listed once for all of these.
    """
    blocks = tuple(blocks)
    readers = readers_of(step, [block for block, _ in blocks], (step.instance_id,))
    single_rows: list[int] = []
    single_slots: list[Tensor] = []
    slots: list[Tensor] = []
    first_keys: dict[RequestId, int] = {}
    tasks = []
    num_queries = num_slots = 0
    for block, row in blocks:
        request_id = block.request_id
        if not (kv := readers.alone(request_id, step.keys_of(request_id))):
            continue
        if len(block.positions) == 1 and all(p[-1] <= block.positions[0] for p in kv if p):
            single_rows.append(row)
            its_kv = within(step.window, block.positions[0], kv)
            single_slots.append(step.slots(request_id, its_kv))
            continue
        if request_id not in first_keys:
            first_keys[request_id] = num_slots
            slots.append(step.slots(request_id, kv))
            num_slots += len(slots[-1])
        tasks.append(tasks_of(block, row, first_keys[request_id], kv, step.window))
        num_queries += len(block.positions)
    shared_slots = concatenate(step.store.slots(*listed) for listed in readers.listed)
    shared = shared_table(readers, blocks, shared_slots, device)
    if not (single_rows or tasks) and shared is None:
        return None
    singles = None
    if single_rows:
        lists = SlotLists(*map(device.upload, SlotLists.of(single_slots)))
        singles = Singles(device.upload(torch.tensor(single_rows)), lists)
    keys = _keys(concatenate(slots), num_queries, device)
    return PoolAttention(singles, keys, tables_of(tasks, device, step.window), shared)


def _keys(slots: Tensor, num_queries: int, device: Device) -> Keys:
    """Return how `num_queries` queries reach their keys in slots [n]."""
    if num_queries >= _LEAST_IN_ROW:
        if (row := _as_row(slots)) is not None:
            return KeysInRow(row)
        if len(slots) <= MOST_COPIED:
            return KeysCopied(device.upload(slots))
    return KeysInPool(device.upload(slots))


def _as_row(slots: Tensor) -> slice | None:
    """Return the slots [n], n > 0, as a slice if they are consecutive, else None."""
    first = int(slots[0])
    row = slice(first, first + len(slots))
    return row if torch.equal(slots, torch.arange(row.start, row.stop)) else None
