"""Striped ring attention: KV travels round the ring, queries stay (LoongServe, section 4.1)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep, all_positions, concatenate, row_range
from loong.attention.local import tables_of, tasks_of
from loong.attention.ring_kv import RingKV
from loong.attention.shared import SharedReaders, shared_table
from loong.core.placement import InstanceId
from loong.core.plan import QueryBlock, Transfer
from loong.core.positions import intersection
from loong.core.request import RequestId
from loong.core.shared_kv import LEAST_ALONE
from loong.fabric.protocol import OpenBatch, ring_step
from loong.kernels import Partial
from loong.kernels.shared_table import SharedTable
from loong.model.device import AttendTable, Device


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows that an instance contributes to a step, on the host.

    Rows count its block (`RingKV`) and the space behind the block.
    """

    history_rows: Tensor  # [n] int64
    history_slots: Tensor  # [n] int64, of `history_rows` in the pool
    new_rows: Tensor  # [T] int64, of all rows of the step
    rows_to_store: Tensor  # [m] int64, those of `new_rows` that do not travel, behind the block


@dataclass(frozen=True, slots=True)
class RingBlock:
    """The KV that one instance sends round the ring, and its use on this instance."""

    num_tokens: int
    tables: Mapping[int | None, tuple[AttendTable, ...]]  # of this instance's queries, by window of the layer
    shared: SharedTable | None  # of these, for layers without a window: what they read together
    kept_rows: Tensor  # [n] int64, of the block, stored here (retention)
    kept_slots: Mapping[int | None, Tensor]  # [n] int64, by window of the layer


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A ring pass on one instance: the blocks in order of arrival, and the rows that make its own block.

    Behind its own block is space for new KV that does not travel.
    """

    ring: tuple[InstanceId, ...]
    blocks: tuple[RingBlock, ...]
    history_rows: Tensor  # [n] int64, of the own block
    history_slots: Mapping[int | None, Tensor]  # [n] int64, by window of the layer
    new_rows: Tensor  # [T] int64, in the own block and behind it, of all rows of the step
    rows_to_store: Tensor  # [m] int64, those of `new_rows` that are behind the block

    def is_merged(self, window: int | None) -> bool:
        """Return whether some query attends in several calls, in layers with this window."""
        tables = [table for block in self.blocks for table in block.tables[window]]
        is_shared = window is None and any(block.shared is not None for block in self.blocks)
        return is_shared or len(tables) > 1 or any(table.is_merged for table in tables)


def ring_layout(step: AttentionStep, device: Device) -> RingLayout | None:
    """Return this instance's part in the ring of a step, or None if no KV travels."""
    if not step.requests(Transfer.KV):
        return None
    group, kinds = step.batch.group, step.by_window()
    blocks = [RingKV.of(step, group.source_at(step.instance_id, hop)) for hop in range(group.dop)]
    own = own_rows(step, blocks[0])
    history_slots = {window: own_rows(its, blocks[0]).history_slots for window, its in kinds.items()}
    return RingLayout(
        ring=group.instance_ids,
        blocks=tuple(_ring_block(step, kinds, sent, device) for sent in blocks),
        history_rows=device.upload(own.history_rows),
        history_slots={window: device.upload(slots) for window, slots in history_slots.items()},
        new_rows=device.upload(own.new_rows),
        rows_to_store=device.upload(own.rows_to_store),
    )


def own_rows(step: AttentionStep, sent: RingKV) -> OwnRows:
    """Return the rows of the block that this instance sends."""
    history_rows = [row_range(slice(0, sent.readers.num_listed))]
    history_slots = [step.store.slots(*listed) for listed in sent.readers.listed]
    next_rows = dict(sent.first_rows)
    for request_id, first in sent.first_rows.items():
        held = step.placements[request_id].on(step.instance_id)
        held = sent.readers.alone(request_id, held)
        next_rows[request_id] = first + sum(map(len, held))
        history_rows.append(row_range(slice(first, next_rows[request_id])))
        history_slots.append(step.slots(request_id, held))
    new_rows, rows_to_store, end = [], [], sent.num_rows
    for block in step.blocks:
        first = next_rows[block.request_id] if block.transfer is Transfer.KV else end
        new_rows.append(row_range(slice(first, first + len(block.positions))))
        if block.transfer is Transfer.KV:
            next_rows[block.request_id] += len(block.positions)
        if block.transfer is not Transfer.KV:
            rows_to_store.append(new_rows[-1])
            end += len(block.positions)
    return OwnRows(*map(concatenate, (history_rows, history_slots, new_rows, rows_to_store)))


def own_block(layout: RingLayout, pool: Tensor, device: Device, window: int | None = None) -> Tensor:
    """Return this instance's block [n, ...] and the space behind it, with the history copied from the pool of
    a layer with that window.
    """
    num_rows = layout.blocks[0].num_tokens + len(layout.rows_to_store)
    block = pool.new_empty(num_rows, *pool.shape[1:])
    if len(layout.history_rows):
        slots = layout.history_slots[window]
        device.copy_rows(pool, block, source_rows=slots, target_rows=layout.history_rows)
    return block


def ring_attention(
    layout: RingLayout,
    pool: Tensor,
    batch: OpenBatch,
    q: Tensor,
    block: Tensor,
    total: Partial,
    device: Device,
    window: int | None = None,
) -> None:
    """Merge attention of q [T, H, D] over all circulating KV into `total`, and store the rows that stay here.

    `window` is that of the layer, and `block` is this instance's own. The next block travels while this
    instance attends over the present one. Storing rows of a passing block in a layer of the pool [S, ...]
    costs no message.
    """
    scale = q.shape[-1] ** -0.5
    block = block[: layout.blocks[0].num_tokens]
    for present, following in zip(layout.blocks, (*layout.blocks[1:], None), strict=True):
        if following is not None:
            incoming = pool.new_empty(following.num_tokens, *pool.shape[1:])
            pending = ring_step(batch, layout.ring, block, incoming)
        if window is None and present.shared is not None:
            device.attend_shared(q, block, present.shared, scale=scale, total=total)
        for table in present.tables[window]:
            device.attend_blocks(q, block, table, scale=scale, total=total)
        if len(present.kept_rows):
            slots = present.kept_slots[window]
            device.copy_rows(block, pool, source_rows=present.kept_rows, target_rows=slots)
        if following is not None:
            pending.wait()
            block = incoming


def kept_rows(step: AttentionStep, sent: RingKV) -> tuple[Tensor, Tensor]:
    """Return the rows [n] int64 of a block that stay on this instance, and their slots [n] int64."""
    rows, slots = [], []
    for request_id, first in sent.first_rows.items():
        for its_rows, positions in _kept(step, request_id, sent.rest[request_id]):
            rows.append(first + its_rows)
            slots.append(step.slots(request_id, (positions,)))
    return concatenate(rows), concatenate(slots)


def _ring_block(
    step: AttentionStep,
    kinds: Mapping[int | None, AttentionStep],
    sent: RingKV,
    device: Device,
) -> RingBlock:
    rows, _ = kept_rows(step, sent)
    slots = {window: kept_rows(its, sent)[1] for window, its in kinds.items()}
    together = _together(step, sent.readers)
    return RingBlock(
        num_tokens=sent.num_rows,
        tables={
            window: _tables(its, sent, together if window is None else {}, device)
            for window, its in kinds.items()
        },
        shared=shared_table(sent.readers, together.items(), torch.arange(sent.readers.num_listed), device),
        kept_rows=device.upload(rows),
        kept_slots={window: device.upload(its) for window, its in slots.items()},
    )


def _together(step: AttentionStep, readers: SharedReaders) -> Mapping[QueryBlock, int]:
    """Return the blocks of this instance that read together, with their first rows.

    Those of requests with many queries here read alone: what they share has travelled once all the same.
    """
    sharing = frozenset(readers.ordered_ids)
    num_queries: Counter[RequestId] = Counter()
    for block in step.blocks:
        num_queries[block.request_id] += len(block.positions)
    few = [i for i in sharing if 0 < num_queries[i] < LEAST_ALONE]
    if len(few) < 2:
        return {}
    return {block: rows.start for block, rows in step.rows.items() if block.request_id in few}


def _tables(
    step: AttentionStep,
    sent: RingKV,
    together: Mapping[QueryBlock, int],
    device: Device,
) -> tuple[AttendTable, ...]:
    """Return the attention of this instance's queries over the block of an instance.

    Blocks of `together` attend what they share in another call.
    """
    tasks = []
    for block, rows in step.rows.items():
        if block.transfer is Transfer.KV and step.meets(block, sent.source_id):
            *shared, rest = sent.pieces(block.request_id)
            pieces = [rest] if block in together else [*shared, rest]
            its = [tasks_of(block, rows.start, row, kv, step.window) for row, kv in pieces]
            tasks.append(tuple(chain.from_iterable(its)))
    return tables_of(tasks, device, step.window)


def _kept(step: AttentionStep, request_id: RequestId, kv: Iterable[range]) -> Iterator[tuple[Tensor, range]]:
    """Yield the rows [n] int64 of a request's part of a block that stay here, with their positions."""
    here = [s.positions for s in step.batch.writes_of(request_id) if s.instance_id == step.instance_id]
    offset = 0
    for positions in kv:
        for written in here:
            if common := intersection(positions, written):
                rows = range(positions.index(common[0]), positions.index(common[-1]) + 1)
                yield offset + all_positions((rows[:: common.step // positions.step],)), common
        offset += len(positions)
