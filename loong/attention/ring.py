"""Striped ring attention: KV goes round, queries stay (LoongServe, section 4.1)."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from loong.attention.local import AttendCall, accumulate, attend_call
from loong.attention.step import Step, concatenate, consecutive_slices, members, row_range
from loong.core.placement import InstanceId
from loong.core.plan import Transfer
from loong.core.positions import intersection
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


def _parts(step: Step, source_id: InstanceId) -> Mapping[str, slice]:
    """The rows of each request in the block that an instance sends round."""
    request_ids = step.requests(Transfer.KV)
    sizes = (sum(map(len, step.kv_on(source_id, request_id))) for request_id in request_ids)
    return dict(zip(request_ids, consecutive_slices(sizes), strict=True))


def _ring_block(step: Step, source_id: InstanceId) -> RingBlock:
    parts = _parts(step, source_id)
    calls, kept_rows, kept_slots = [], [], []
    for block, queries in step.rows.items():
        rows = parts.get(block.request_id, slice(0, 0))
        kv = step.kv_on(source_id, block.request_id)
        if rows.stop > rows.start and any(p[0] <= block.positions[-1] for p in kv if p):
            calls.append(attend_call(block, queries, rows, kv))
    for request_id, rows in parts.items():
        offset = rows.start
        wanted = [w for w in step.batch.writes_of(request_id) if w.instance_id == step.instance_id]
        for positions in step.kv_on(source_id, request_id):
            for segment in wanted:
                if common := intersection(positions, segment.positions):
                    index = range(positions.index(common[0]), positions.index(common[-1]) + 1)
                    kept_rows.append(offset + members((index[:: common.step // positions.step],)))
                    kept_slots.append(step.slots(request_id, (common,)))
            offset += len(positions)
    num_tokens = max((rows.stop for rows in parts.values()), default=0)
    return RingBlock(num_tokens, tuple(calls), concatenate(kept_rows), concatenate(kept_slots))
