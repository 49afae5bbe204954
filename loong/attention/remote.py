"""Attention where the KV is: queries go out, partials come back (multi-master decode, DistAttention)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loong.attention.pool import PoolAttention, pool_attention
from loong.attention.step import Step, concatenate, consecutive_slices, row_range
from loong.core.placement import InstanceId
from loong.core.plan import QueryBlock, Transfer
from loong.fabric.protocol import Fabric
from loong.fabric.traffic import Channel
from loong.kernels import Partial
from loong.model.device import Device


@dataclass(frozen=True, slots=True)
class ServedQueries:
    """Queries that a peer sends here, to be attended over this instance's pool."""

    num_tokens: int
    attention: PoolAttention


@dataclass(frozen=True, slots=True)
class QueryLayout:
    """The exchange of a step on one instance: whom it asks, whom it serves, what it can answer itself."""

    local: PoolAttention | None
    asked: Mapping[InstanceId, Tensor]  # by peer: rows [n] int64 of the step whose queries go there
    served: Mapping[InstanceId, ServedQueries]  # by peer
    stored_slots: Tensor  # [n] int64, of the KV that stays here because its queries travel

    @property
    def is_empty(self) -> bool:
        """Whether no query attends where it does not travel, nor travels."""
        return self.local is None and not self.asked and not self.served

    @property
    def is_merged(self) -> bool:
        """Whether an own query attends in several calls, or elsewhere, too."""
        return bool(self.asked) or (self.local is not None and self.local.is_merged)


def query_layout(step: Step, device: Device) -> QueryLayout:
    """What this instance does for the blocks whose queries travel."""
    blocks = [block for block in step.batch.queries if block.transfer is Transfer.QUERY]
    own = [block for block in blocks if block.master_id == step.instance_id]
    peers = [i for i in step.batch.group.instance_ids if i != step.instance_id]
    asked = {
        peer_id: concatenate(row_range(step.rows[b]) for b in own if step.meets(b, peer_id))
        for peer_id in peers
    }
    here = [block for block in blocks if step.meets(block, step.instance_id)]
    served = {peer_id: _serve(step, [b for b in here if b.master_id == peer_id], device) for peer_id in peers}
    return QueryLayout(
        local=pool_attention(step, ((b, step.rows[b].start) for b in here if b in step.rows), device),
        asked={peer_id: device.upload(rows) for peer_id, rows in asked.items() if len(rows)},
        served={peer_id: queries for peer_id, queries in served.items() if queries is not None},
        stored_slots=device.upload(concatenate(step.slots(b.request_id, (b.positions,)) for b in own)),
    )


def query_attention(
    layout: QueryLayout, pool: Tensor, fabric: Fabric, q: Tensor, total: Partial, device: Device
) -> None:
    """Merge attention of the rows whose queries travel, q [T, H, D], into `total`.

    This instance's own share of a layer of its pool [S, 2, K, D] is computed while the queries are under
    way. Partials come back as [n, H, D + 1] float32: out, and lse in the last column, in one message.
    """
    outgoing = {peer_id: q[rows] for peer_id, rows in layout.asked.items()}
    incoming = {i: q.new_empty(served.num_tokens, *q.shape[1:]) for i, served in layout.served.items()}
    pending = fabric.exchange(outgoing, incoming, Channel.QUERIES) if outgoing or incoming else None
    if layout.local is not None:
        layout.local.merge_into(total, q, pool, device)
    if pending is None:
        return
    pending.wait()
    answers = {i: _answer(layout.served[i].attention, pool, peer_q, device) for i, peer_q in incoming.items()}
    shape = (q.shape[1], q.shape[2] + 1)
    partials = {
        i: torch.empty(len(rows), *shape, dtype=torch.float32, device=q.device)
        for i, rows in layout.asked.items()
    }
    fabric.exchange(answers, partials, Channel.PARTIALS).wait()
    for peer_id, rows in layout.asked.items():
        part = partials[peer_id][None]
        device.merge_into(total, Partial(part[..., :-1], part[..., -1]), rows)


def _answer(attention: PoolAttention, pool: Tensor, q: Tensor, device: Device) -> Tensor:
    """The partials [n, H, D + 1] of a peer's queries q [n, H, D] over this instance's KV."""
    part = device.nothing_seen(q, is_merged=True)
    attention.merge_into(part, q, pool, device)
    return torch.cat((part.out, part.lse[..., None]), dim=-1)


def _serve(step: Step, blocks: list[QueryBlock], device: Device) -> ServedQueries | None:
    """The part of this instance in answering one peer, whose blocks come one after the other."""
    rows = [piece.start for piece in consecutive_slices(len(block.positions) for block in blocks)]
    attention = pool_attention(step, zip(blocks, rows, strict=True), device)
    if attention is None:
        return None
    return ServedQueries(sum(len(block.positions) for block in blocks), attention)
