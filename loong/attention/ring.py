"""Striped ring attention: KV goes round, queries stay (LoongServe, section 4.1)."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from loong.attention.local import AttendCall, accumulate, attend_call
from loong.attention.step import Step, concatenate, consecutive_slices, members, row_range
from loong.core.placement import InstanceId
from loong.core.plan import Transfer
from loong.core.positions import intersection
from loong.core.request import RequestId
from loong.fabric.protocol import Fabric
from loong.kernels import Partial


@dataclass(frozen=True, slots=True)
class RingBlock:
    """The KV that one instance sends round, and what this instance does with it."""

    num_tokens: int
    calls: tuple[AttendCall[slice], ...]  # of this instance's queries
    kept_rows: Tensor  # [n] int64, of the block: what stays here (proactive scale-down)
    kept_slots: Tensor  # [n] int64


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A ring pass on one instance: the blocks in the order of their coming, and how to make its own."""

    ring: tuple[InstanceId, ...]
    blocks: tuple[RingBlock, ...]
    history_rows: Tensor  # [n] int64, of the own block
    history_slots: Tensor  # [n] int64
    fresh_rows: Tensor  # [m] int64, of the own block
    fresh_tokens: Tensor  # [m] int64, rows of the step


def ring_layout(step: Step) -> RingLayout | None:
    """What this instance does in the ring of a step; None if no KV travels."""
    if not step.requests(Transfer.KV):
        return None
    group = step.batch.group
    sources = (group.source_at(step.instance_id, ring_step) for ring_step in range(group.dop))
    history_rows, history_slots, fresh_rows, fresh_tokens = [], [], [], []
    own_rows = {block.request_id: rows for block, rows in step.rows.items()}
    for request_id, rows in _parts(step, step.instance_id).items():
        history = step.placements[request_id].on(step.instance_id)
        num_history = sum(map(len, history))
        history_rows.append(row_range(slice(rows.start, rows.start + num_history)))
        history_slots.append(step.slots(request_id, history))
        fresh_rows.append(row_range(slice(rows.start + num_history, rows.stop)))
        fresh_tokens.append(row_range(own_rows.get(request_id, slice(0, 0))))
    return RingLayout(
        ring=group.instance_ids,
        blocks=tuple(_ring_block(step, source_id) for source_id in sources),
        history_rows=concatenate(history_rows),
        history_slots=concatenate(history_slots),
        fresh_rows=concatenate(fresh_rows),
        fresh_tokens=concatenate(fresh_tokens),
    )


def ring_attention(
    layout: RingLayout,
    step: Step,
    fabric: Fabric,
    layer: int,
    qkv: tuple[Tensor, Tensor, Tensor],
    total: Partial,
) -> None:
    """Merge attention over all circulating KV into `total`, and keep what is to stay here.

    q [T, H, D]; k, v [T, K, D] of the step's rows. The next block is under way while the present one is
    attended; keeping rows of a passing block costs no message.
    """
    q, k, v = qkv
    block = k.new_empty(layout.blocks[0].num_tokens, 2, *k.shape[1:])
    block[layout.history_rows] = step.store.rows(layer, layout.history_slots)
    block[layout.fresh_rows, 0] = k[layout.fresh_tokens]
    block[layout.fresh_rows, 1] = v[layout.fresh_tokens]
    scale = q.shape[-1] ** -0.5
    for present, following in zip(layout.blocks, (*layout.blocks[1:], None), strict=True):
        if following is not None:
            incoming = k.new_empty(following.num_tokens, 2, *k.shape[1:])
            pending = fabric.ring_step(layout.ring, block, incoming)
        for call in present.calls:
            accumulate(total, q, block[call.keys], call, scale)
        if len(present.kept_rows):
            kept = block[present.kept_rows]
            step.store.store(layer, present.kept_slots, kept[:, 0], kept[:, 1])
        if following is not None:
            pending.wait()
            block = incoming


def _parts(step: Step, source_id: InstanceId) -> Mapping[RequestId, slice]:
    """The rows of each request in the block that an instance sends round."""
    request_ids = step.requests(Transfer.KV)
    sizes = (sum(map(len, step.kv_on(source_id, request_id))) for request_id in request_ids)
    return dict(zip(request_ids, consecutive_slices(sizes), strict=True))


def _ring_block(step: Step, source_id: InstanceId) -> RingBlock:
    parts = _parts(step, source_id)
    calls = tuple(
        attend_call(block, rows, parts[block.request_id], step.kv_on(source_id, block.request_id))
        for block, rows in step.rows.items()
        if block.transfer is Transfer.KV and step.meets(block, source_id)
    )
    kept_rows, kept_slots = [], []
    for request_id, part in parts.items():
        for rows, positions in _kept(step, request_id, step.kv_on(source_id, request_id)):
            kept_rows.append(part.start + rows)
            kept_slots.append(step.slots(request_id, (positions,)))
    num_tokens = max(part.stop for part in parts.values())
    return RingBlock(num_tokens, calls, concatenate(kept_rows), concatenate(kept_slots))


def _kept(step: Step, request_id: RequestId, kv: Iterable[range]) -> Iterator[tuple[Tensor, range]]:
    """Which rows [n] int64 of a request's part of a block are to stay here, and their positions."""
    offset = 0
    for positions in kv:
        for segment in step.batch.writes_of(request_id):
            common = intersection(positions, segment.positions)
            if common and segment.instance_id == step.instance_id:
                rows = range(positions.index(common[0]), positions.index(common[-1]) + 1)
                yield offset + members((rows[:: common.step // positions.step],)), common
        offset += len(positions)
