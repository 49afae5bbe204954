"""Attention of a whole step, over KV that lies anywhere in the group."""

from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.exchange import QueryExchange
from loong.attention.push import OutgoingPushes
from loong.attention.remote import query_attention, query_layout
from loong.attention.ring import own_block, ring_attention, ring_layout
from loong.fabric.protocol import OpenBatch
from loong.kernels import Partial
from loong.model.device import Device


class ElasticAttention:
    """Implements `transformer.Attention` for one step of a plan."""

    def __init__(self, step: AttentionStep, batch: OpenBatch, device: Device) -> None:
        self._step, self._batch, self._device = step, batch, device
        self._queries = query_layout(step, device)
        self._exchange = QueryExchange(batch, device, self._queries.routing)
        self._ring = ring_layout(step, device)
        self._pushes = OutgoingPushes(step, batch, device)
        self._new_kv: tuple[Tensor, Tensor] | None = None  # of this layer: and its rows [T] there
        self._block: Tensor | None = None  # of this layer: the own ring block, then new KV that stays
        has_both = self._ring is not None and self._queries.local is not None
        is_ring_merged = self._ring is not None and self._ring.is_merged
        self._is_merged = has_both or self._queries.is_merged or is_ring_merged

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `transformer.Attention`.

        New KV goes into the pool, or into the block that travels round the ring.
        """
        pool = self._step.store.layer(layer)
        if self._ring is None:
            self._new_kv = pool, self._queries.stored_slots
        else:
            self._block = own_block(self._ring, pool, self._device)
            self._new_kv = self._block, self._ring.new_rows
        return self._new_kv

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """See `transformer.Attention`. The new KV ends where the plan says."""
        pool = self._step.store.layer(layer)
        pushed = None if self._new_kv is None else self._pushes.send(*self._new_kv)
        total = Partial.unseen(q, is_merged=self._is_merged)
        if self._ring is not None and self._block is not None and len(self._ring.rows_to_store):
            self._device.copy_rows(
                self._block,
                pool,
                source_rows=self._ring.rows_to_store,
                target_rows=self._queries.stored_slots,
            )
        query_attention(self._queries, pool, self._exchange, q, total, self._device)
        if self._ring is not None and self._block is not None:
            ring_attention(self._ring, pool, self._batch, q, self._block, total, self._device)
        if pushed is not None:
            pushed.wait()
        return total.out.to(q.dtype)
