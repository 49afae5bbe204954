"""Attention of a whole step, over KV that lies anywhere in the group."""

from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.exchange import QueryExchange
from loong.attention.push import OutgoingPushes
from loong.attention.remote import QueryLayout, query_attention, query_layout
from loong.attention.ring import own_block, ring_attention, ring_layout
from loong.fabric.protocol import OpenBatch
from loong.kernels import Partial
from loong.model.device import Device


class ElasticAttention:
    """Implements `transformer.Attention` for one step of a plan."""

    def __init__(self, step: AttentionStep, batch: OpenBatch, device: Device) -> None:
        self._step, self._batch, self._device = step, batch, device
        self._ring = ring = ring_layout(step, device)
        self._kinds: dict[int | None, tuple[QueryLayout, QueryExchange, bool]] = {}  # by window of layers
        for window, its in step.by_window().items():
            queries = query_layout(its, device)
            has_both = ring is not None and queries.local is not None
            is_merged = has_both or queries.is_merged or (ring is not None and ring.is_merged(window))
            self._kinds[window] = queries, QueryExchange(batch, device, queries.routing), is_merged
        self._pushes = OutgoingPushes(step, batch, device)
        self._new_kv: tuple[Tensor, Tensor] | None = None  # of this layer: and its rows [T] there
        self._block: Tensor | None = None  # of this layer: the own ring block, then new KV that stays

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """See `transformer.Attention`.

        New KV goes into the pool, or into the block that travels round the ring.
        """
        window, pool = self._step.store.layout.window(layer), self._step.store.layer(layer)
        if self._ring is None:
            self._new_kv = pool, self._kinds[window][0].stored_slots
        else:
            self._block = own_block(self._ring, pool, self._device, window)
            self._new_kv = self._block, self._ring.new_rows
        return self._new_kv

    def __call__(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """See `transformer.Attention`. The new KV ends where the plan says."""
        window, pool = self._step.store.layout.window(layer), self._step.store.layer(layer)
        queries, exchange, is_merged = self._kinds[window]
        pushed = None if self._new_kv is None else self._pushes.send(*self._new_kv)
        total = Partial.unseen(q, is_merged=is_merged)
        if self._ring is not None and self._block is not None and len(self._ring.rows_to_store):
            rows, slots = self._ring.rows_to_store, queries.stored_slots
            self._device.copy_rows(self._block, pool, source_rows=rows, target_rows=slots)
        query_attention(queries, pool, exchange, q, total, self._device)()
        if self._ring is not None and self._block is not None:
            ring_attention(self._ring, pool, self._batch, q, self._block, total, self._device, window)
        if pushed is not None:
            pushed.wait()
        if sinks is not None:
            self._device.add_sinks(total, sinks)
        return total.out.to(q.dtype)
