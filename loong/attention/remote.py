"""Attention where the KV is: queries go out, partials come back (multi-master decode, DistAttention)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from loong.attention.attention_step import AttentionStep, concatenate, consecutive_slices, row_range
from loong.attention.exchange import QueryExchange, QueryRouting
from loong.attention.pool import PoolAttention, pool_attention
from loong.core.plan import QueryBlock, Transfer
from loong.kernels import Partial
from loong.model.device import Device


@dataclass(frozen=True, slots=True)
class QueryLayout:
    """The blocks of a step whose queries travel, as one instance sees them.

    It sends some to peers, serves the peers' blocks, and attends over its own pool.
    """

    local: PoolAttention | None
    routing: QueryRouting
    peer_attention: PoolAttention | None  # of the peers' rows, in the order of their arrival
    stored_slots: Tensor  # [n] int64, of the KV that stays here because its queries travel

    @property
    def is_merged(self) -> bool:
        """Return whether an own query attends in several calls, or partials of peers are merged.

        An instance that only serves the queries of peers needs a total to merge into as well.
        """
        return not self.routing.is_empty or (self.local is not None and self.local.is_merged)


def query_layout(step: AttentionStep, device: Device) -> QueryLayout:
    """Return what this instance does for the blocks whose queries travel."""
    blocks = [block for block in step.batch.queries if block.transfer is Transfer.QUERY]
    own = [block for block in blocks if block.master_id == step.instance_id]
    here = [block for block in blocks if step.meets(block, step.instance_id)]
    peers = step.peer_ids
    sent_rows = {i: concatenate(row_range(step.rows[b]) for b in own if step.meets(b, i)) for i in peers}
    theirs = {i: [b for b in here if b.master_id == i] for i in peers}
    stored = [block for block in step.stored_blocks if block.transfer is Transfer.QUERY]
    routing = QueryRouting(
        sent_rows={i: rows for i, rows in sent_rows.items() if len(rows)},
        num_peer_rows={i: sum(len(b.positions) for b in theirs[i]) for i in peers if theirs[i]},
    )
    return QueryLayout(
        local=pool_attention(step, ((b, step.rows[b].start) for b in here if b in step.rows), device),
        routing=routing,
        peer_attention=_peer_attention(step, [block for i in peers for block in theirs[i]], device),
        stored_slots=device.upload(concatenate(step.slots(b.request_id, (b.positions,)) for b in stored)),
    )


def query_attention(
    layout: QueryLayout, pool: Tensor, exchange: QueryExchange, q: Tensor, total: Partial, device: Device
) -> Callable[[], None]:
    """Merge attention of the rows of q [T, H, D] whose queries travel into `total`, by the call returned.

    While the queries travel, this instance attends over a layer of its own pool [S, ...].
    """
    if not layout.routing.is_empty:
        exchange.send_queries(q)
    if layout.local is not None:
        layout.local.merge_into(total, q, pool, device)

    def end() -> None:
        if layout.routing.is_empty:
            return
        came, peer_attention = exchange.peer_queries(), layout.peer_attention
        part = Partial.unseen(came, is_merged=peer_attention is not None and peer_attention.is_merged)
        if peer_attention is not None:
            peer_attention.merge_into(part, came, pool, device)
        exchange.send_partials(part, total)

    return end


def attended_by_queries(
    layout: QueryLayout,
    pool: Tensor,
    exchange: QueryExchange,
    q: Tensor,
    sinks: Tensor | None,
    device: Device,
) -> Callable[[], Tensor]:
    """Begin all attention of q [T, H, D], with the sinks [H] if there are any; the call returned ends it."""
    total = Partial.unseen(q, is_merged=layout.is_merged)
    end = query_attention(layout, pool, exchange, q, total, device)

    def result() -> Tensor:
        end()
        if sinks is not None:
            device.add_sinks(total, sinks)
        return total.out.to(q.dtype)

    return result


def _peer_attention(step: AttentionStep, blocks: list[QueryBlock], device: Device) -> PoolAttention | None:
    """Return the attention of the peers' blocks, which follow each other, in this instance's pool."""
    rows = [piece.start for piece in consecutive_slices(len(block.positions) for block in blocks)]
    return pool_attention(step, zip(blocks, rows, strict=True), device)
