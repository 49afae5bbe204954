"""Striped ring attention: KV travels round the ring, queries stay (LoongServe, section 4.1)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from loong.attention.attention_step import (
    AttentionStep,
    all_positions,
    concatenate,
    consecutive_slices,
    row_range,
)
from loong.attention.local import tables_of, tasks_of
from loong.core.placement import InstanceId
from loong.core.plan import Transfer
from loong.core.positions import intersection
from loong.core.request import RequestId
from loong.fabric.protocol import OpenBatch, ring_step
from loong.kernels import Partial
from loong.model.device import AttendTable, Device


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows that an instance contributes to a step, on the host.

    Rows count its block and the space behind the block. In the block, the history of each request comes
    before its new KV.
    """

    history_rows: Tensor  # [n] int64
    history_slots: Tensor  # [n] int64, of `history_rows` in the pool
    new_rows: Tensor  # [T] int64, of all rows of the step
    rows_to_store: Tensor  # [m] int64, those of `new_rows` that do not travel, behind the block


@dataclass(frozen=True, slots=True)
class RingBlock:
    """The KV that one instance sends round the ring, and its use on this instance."""

    num_tokens: int
    tables: tuple[AttendTable, ...]  # of this instance's queries
    kept_rows: Tensor  # [n] int64, of the block, stored here (retention)
    kept_slots: Tensor  # [n] int64


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A ring pass on one instance: the blocks in order of arrival, and the rows that make its own block.

    Behind its own block is space for new KV that does not travel.
    """

    ring: tuple[InstanceId, ...]
    blocks: tuple[RingBlock, ...]
    history_rows: Tensor  # [n] int64, of the own block
    history_slots: Tensor  # [n] int64
    new_rows: Tensor  # [T] int64, in the own block and behind it, of all rows of the step
    rows_to_store: Tensor  # [m] int64, those of `new_rows` that are behind the block

    @property
    def is_merged(self) -> bool:
        """Return whether some query attends in several calls."""
        tables = [table for block in self.blocks for table in block.tables]
        return len(tables) > 1 or any(table.is_merged for table in tables)


def ring_layout(step: AttentionStep, device: Device) -> RingLayout | None:
    """Return this instance's part in the ring of a step, or None if no KV travels."""
    if not step.requests(Transfer.KV):
        return None
    group, own = step.batch.group, own_rows(step)
    sources = (group.source_at(step.instance_id, hop) for hop in range(group.dop))
    return RingLayout(
        ring=group.instance_ids,
        blocks=tuple(_ring_block(step, source_id, device) for source_id in sources),
        history_rows=device.upload(own.history_rows),
        history_slots=device.upload(own.history_slots),
        new_rows=device.upload(own.new_rows),
        rows_to_store=device.upload(own.rows_to_store),
    )


def own_rows(step: AttentionStep) -> OwnRows:
    """Return the rows of the block that this instance contributes."""
    history_rows, history_slots = [], []
    first_new_rows: dict[RequestId, int] = {}
    for request_id, rows in parts_of(step, step.instance_id).items():
        history = step.placements[request_id].on(step.instance_id)
        first_new_rows[request_id] = rows.start + sum(map(len, history))
        history_rows.append(row_range(slice(rows.start, first_new_rows[request_id])))
        history_slots.append(step.slots(request_id, history))
    new_rows, rows_to_store, end = [], [], num_rows_of(step, step.instance_id)
    for block in step.blocks:
        first = first_new_rows[block.request_id] if block.transfer is Transfer.KV else end
        new_rows.append(row_range(slice(first, first + len(block.positions))))
        if block.transfer is Transfer.KV:
            first_new_rows[block.request_id] += len(block.positions)
        if block.transfer is not Transfer.KV:
            rows_to_store.append(new_rows[-1])
            end += len(block.positions)
    return OwnRows(*map(concatenate, (history_rows, history_slots, new_rows, rows_to_store)))


def own_block(layout: RingLayout, pool: Tensor, device: Device) -> Tensor:
    """Return this instance's block [n, ...] and the space behind it, with the history copied from the
    pool.
    """
    num_rows = layout.blocks[0].num_tokens + len(layout.rows_to_store)
    block = pool.new_empty(num_rows, *pool.shape[1:])
    if len(layout.history_rows):
        device.copy_rows(pool, block, source_rows=layout.history_slots, target_rows=layout.history_rows)
    return block


def ring_attention(
    layout: RingLayout,
    pool: Tensor,
    batch: OpenBatch,
    q: Tensor,
    block: Tensor,
    total: Partial,
    device: Device,
) -> None:
    """Merge attention of q [T, H, D] over all circulating KV into `total`, and store the rows that stay here.

    `block` is this instance's own. The next block travels while this instance attends over the present one.
    Storing rows of a passing block in a layer of the pool [S, ...] costs no message.
    """
    scale = q.shape[-1] ** -0.5
    block = block[: layout.blocks[0].num_tokens]
    for present, following in zip(layout.blocks, (*layout.blocks[1:], None), strict=True):
        if following is not None:
            incoming = pool.new_empty(following.num_tokens, *pool.shape[1:])
            pending = ring_step(batch, layout.ring, block, incoming)
        for table in present.tables:
            device.attend_blocks(q, block, table, scale=scale, total=total)
        if len(present.kept_rows):
            device.copy_rows(block, pool, source_rows=present.kept_rows, target_rows=present.kept_slots)
        if following is not None:
            pending.wait()
            block = incoming


def parts_of(step: AttentionStep, source_id: InstanceId) -> Mapping[RequestId, slice]:
    """Return the rows of each request in the block of an instance."""
    request_ids = step.requests(Transfer.KV)
    return dict(zip(request_ids, consecutive_slices(_sizes(step, source_id)), strict=True))


def num_rows_of(step: AttentionStep, source_id: InstanceId) -> int:
    """Return the number of rows in the block of an instance."""
    return sum(_sizes(step, source_id))


def _sizes(step: AttentionStep, source_id: InstanceId) -> Iterator[int]:
    for request_id in step.requests(Transfer.KV):
        yield sum(map(len, step.kv_on(source_id, request_id)))


def kept_rows(step: AttentionStep, source_id: InstanceId) -> tuple[Tensor, Tensor]:
    """Return the rows [n] int64 of an instance's block that stay on this instance, and their slots [n]
    int64.
    """
    rows, slots = [], []
    for request_id, part in parts_of(step, source_id).items():
        for its_rows, positions in _kept(step, request_id, step.kv_on(source_id, request_id)):
            rows.append(part.start + its_rows)
            slots.append(step.slots(request_id, (positions,)))
    return concatenate(rows), concatenate(slots)


def _ring_block(step: AttentionStep, source_id: InstanceId, device: Device) -> RingBlock:
    parts = parts_of(step, source_id)
    tasks = [
        tasks_of(block, rows.start, parts[block.request_id].start, step.kv_on(source_id, block.request_id))
        for block, rows in step.rows.items()
        if block.transfer is Transfer.KV and step.meets(block, source_id)
    ]
    rows, slots = kept_rows(step, source_id)
    return RingBlock(
        num_tokens=num_rows_of(step, source_id),
        tables=tables_of(tasks, device),
        kept_rows=device.upload(rows),
        kept_slots=device.upload(slots),
    )


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
