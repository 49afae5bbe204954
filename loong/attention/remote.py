"""Attention where the KV is: queries go out, partials come back (multi-master decode, DistAttention)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loong.attention.local import AttendCall, accumulate, attend_call
from loong.attention.step import Step, concatenate, consecutive_slices, row_range
from loong.core.placement import InstanceId
from loong.core.plan import QueryBlock, Transfer
from loong.fabric.protocol import Fabric
from loong.fabric.traffic import Channel
from loong.kernels import Partial, merge


@dataclass(frozen=True, slots=True)
class ServedQueries:
    """Queries that a peer sends here, to be attended over this instance's pool."""

    num_tokens: int
    calls: tuple[AttendCall[Tensor], ...]


@dataclass(frozen=True, slots=True)
class QueryLayout:
    """The exchange of a step on one instance: whom it asks, whom it serves, what it can answer itself."""

    local_calls: tuple[AttendCall[Tensor], ...]
    asked: Mapping[InstanceId, Tensor]  # by peer: rows [n] int64 of the step whose queries go there
    served: Mapping[InstanceId, ServedQueries]  # by peer
    stored_rows: Tensor  # [n] int64, rows of the step whose KV stays here
    stored_slots: Tensor  # [n] int64


def query_layout(step: Step) -> QueryLayout:
    """What this instance does for the blocks whose queries travel."""
    blocks = [block for block in step.batch.queries if block.transfer is Transfer.QUERY]
    own = [block for block in blocks if block.master_id == step.instance_id]
    peers = [i for i in step.batch.group.instance_ids if i != step.instance_id]
    asked = {
        peer_id: concatenate(row_range(step.rows[b]) for b in own if step.meets(b, peer_id))
        for peer_id in peers
    }
    here = [block for block in blocks if step.meets(block, step.instance_id)]
    served = {peer_id: _serve(step, [b for b in here if b.master_id == peer_id]) for peer_id in peers}
    return QueryLayout(
        local_calls=tuple(_pool_call(step, b, step.rows[b]) for b in here if b in step.rows),
        asked={peer_id: rows for peer_id, rows in asked.items() if len(rows)},
        served={peer_id: queries for peer_id, queries in served.items() if queries.num_tokens},
        stored_rows=concatenate(row_range(step.rows[b]) for b in own),
        stored_slots=concatenate(step.slots(b.request_id, (b.positions,)) for b in own),
    )


def query_attention(
    layout: QueryLayout, step: Step, fabric: Fabric, layer: int, q: Tensor, total: Partial
) -> None:
    """Merge attention of the rows whose queries travel, q [T, H, D], into `total`.

    This instance's own share is computed while the queries are under way. Partials come back as
    [n, H, D + 1] float32: out, and lse in the last column, in one message.
    """
    scale = q.shape[-1] ** -0.5
    outgoing = {peer_id: q[rows] for peer_id, rows in layout.asked.items()}
    incoming = {i: q.new_empty(served.num_tokens, *q.shape[1:]) for i, served in layout.served.items()}
    pending = fabric.exchange(outgoing, incoming, Channel.QUERIES)
    for call in layout.local_calls:
        accumulate(total, q, step.store.rows(layer, call.keys), call, scale)
    pending.wait()
    answers = {i: _answer(layout.served[i], step, layer, peer_q) for i, peer_q in incoming.items()}
    shape = (q.shape[1], q.shape[2] + 1)
    partials = {i: torch.empty(len(rows), *shape) for i, rows in layout.asked.items()}
    fabric.exchange(answers, partials, Channel.PARTIALS).wait()
    for peer_id, rows in layout.asked.items():
        part = Partial(partials[peer_id][..., :-1].contiguous(), partials[peer_id][..., -1].contiguous())
        total.out[rows], total.lse[rows] = merge(Partial(total.out[rows], total.lse[rows]), part)


def _answer(served: ServedQueries, step: Step, layer: int, q: Tensor) -> Tensor:
    """The partials [n, H, D + 1] of a peer's queries q [n, H, D] over this instance's KV."""
    part = Partial.identity(q.shape[0], q.shape[1], q.shape[2], q.device)
    for call in served.calls:
        accumulate(part, q, step.store.rows(layer, call.keys), call, q.shape[-1] ** -0.5)
    return torch.cat((part.out, part.lse[..., None]), dim=-1)


def _pool_call(step: Step, block: QueryBlock, queries: slice) -> AttendCall[Tensor]:
    kv = step.kv_on(step.instance_id, block.request_id)
    return attend_call(block, queries, step.slots(block.request_id, kv), kv)


def _serve(step: Step, blocks: list[QueryBlock]) -> ServedQueries:
    """The part of this instance in answering one peer, whose blocks come one after the other."""
    rows = list(consecutive_slices(len(block.positions) for block in blocks))
    calls = tuple(_pool_call(step, block, queries) for block, queries in zip(blocks, rows, strict=True))
    return ServedQueries(sum(len(block.positions) for block in blocks), calls)
