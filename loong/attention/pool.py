"""Attention of queries over the KV in this instance's pool."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from loong.attention.local import tables_of, tasks_of
from loong.attention.step import Step, concatenate
from loong.core.plan import QueryBlock
from loong.core.positions import coalesce
from loong.kernels import Partial
from loong.kernels.slots import SlotLists
from loong.model.device import AttendTable, Device

_LEAST_IN_ROW = 256  # queries, from which keys had better be in a row
_MOST_COPIED = 1 << 18  # keys: a GiB or so


@dataclass(frozen=True, slots=True)
class Singles:
    """Queries that come one of a request, and see all KV that there is of it (decode)."""

    rows: Tensor  # [B] int64
    lists: SlotLists


@dataclass(frozen=True, slots=True)
class PoolAttention:
    """What some queries attend; no query is in two parts.

    Many queries are quicker if the keys of the tables are in a row, copied out of the pool if not there.
    """

    singles: Singles | None
    slots: Tensor  # [N] int64, of the keys of the tables
    tables: tuple[AttendTable, ...]
    is_copied: bool
    in_row: slice | None = None  # the slots, where they follow each other in the pool

    @property
    def is_merged(self) -> bool:
        """Whether some query attends in several calls, or in one that tells only partials."""
        return (
            self.singles is not None or len(self.tables) > 1 or any(table.is_merged for table in self.tables)
        )

    def merge_into(self, total: Partial, q: Tensor, kv: Tensor, device: Device) -> None:
        """Merge attention of q [T, H, D] over a layer of the pool, kv [S, 2, K, D], into `total`."""
        scale = q.shape[-1] ** -0.5
        if self.singles is not None:
            rows = self.singles.rows
            part = Partial.empty(len(rows), q.shape[1], q.shape[2], q.device)
            device.attend_slots(q[rows], kv, self.singles.lists, scale=scale, out=part)
            device.merge_into(total, Partial(part.out[None], part.lse[None]), rows)
        slots: Tensor | None = self.slots
        if self.in_row is not None:
            kv, slots = kv[self.in_row], None
        elif self.is_copied:
            row = kv.new_empty(len(self.slots), *kv.shape[1:])
            device.copy_rows(kv, row, source_rows=self.slots, target_rows=None)
            kv, slots = row, None
        for table in self.tables:
            device.attend_blocks(q, kv, table, scale=scale, total=total, slots=slots)


def pool_attention(
    step: Step, blocks: Iterable[tuple[QueryBlock, int]], device: Device
) -> PoolAttention | None:
    """What blocks, whose first rows are given, attend in this instance's pool; None if there are none."""
    single_rows: list[int] = []
    single_slots: list[Tensor] = []
    slots: list[Tensor] = []
    tasks = []
    num_queries = num_slots = 0
    for block, row in blocks:
        kv = coalesce(step.kv_on(step.instance_id, block.request_id))
        found = step.slots(block.request_id, kv)
        if len(block.positions) == 1 and all(p[-1] <= block.positions[0] for p in kv if p):
            single_rows.append(row)
            single_slots.append(found)
        else:
            tasks.append(tasks_of(block, row, num_slots, kv))
            slots.append(found)
            num_queries += len(block.positions)
            num_slots += len(found)
    if not single_rows and not tasks:
        return None
    singles = None
    if single_rows:
        lists = SlotLists(*map(device.upload, SlotLists.of(single_slots)))
        singles = Singles(device.upload(torch.tensor(single_rows)), lists)
    key_slots, is_many = concatenate(slots), num_queries >= _LEAST_IN_ROW
    in_row = _as_row(key_slots) if is_many else None
    is_copied = is_many and in_row is None and num_slots <= _MOST_COPIED
    return PoolAttention(singles, device.upload(key_slots), tables_of(tasks, device), is_copied, in_row)


def _as_row(slots: Tensor) -> slice | None:
    """The same slots [n], one or more, if each follows the one before."""
    first = int(slots[0])
    row = slice(first, first + len(slots))
    return row if torch.equal(slots, torch.arange(row.start, row.stop)) else None
