"""Attention in a captured decode step of a group."""

from collections.abc import Mapping

import torch
from torch import Tensor

from loong.kernels import Partial
from loong.kernels.shared_table import SharedTable
from loong.kernels.slots import SlotLists
from loong.model.device import Device
from loong.worker.kv.pool import KVPool
from loong.worker.steps.group_exchange import GroupExchange


class GroupAttention:
    """Attention of one query a request over its slots on all that take part; see `transformer.Attention`.

    `lists` are those of layers by their window. In layers without one, what several requests read is in
    `shared`, if it is given, and in no list.
    """

    def __init__(
        self,
        pool: KVPool,
        new_slots: Tensor,
        lists: Mapping[int | None, SlotLists],
        device: Device,
        exchange: GroupExchange,
        shared: SharedTable | None = None,
    ) -> None:
        self._pool, self._new_slots, self._lists, self._shared = pool, new_slots, lists, shared
        self._device, self._exchange = device, exchange

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return where the KV of a layer's new tokens is stored: the pool, and slots [T]."""
        return self._pool.layer(layer), self._new_slots

    def __call__(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend the queries of all masters at once, after one exchange."""
        queries, window = self._exchange.gather(layer, q), self._pool.layout.window(layer)
        shared = self._shared if window is None else None
        part = Partial.empty(len(queries), q.shape[1], q.shape[2], q.device)
        if shared is None:  # nothing is merged
            part = part._replace(out=torch.empty_like(queries))
        pool, scale = self._pool.layer(layer), q.shape[-1] ** -0.5
        self._device.attend_slots(queries, pool, self._lists[window], scale=scale, out=part)
        if shared is not None:
            self._device.attend_shared(queries, pool, shared, scale=scale, total=part)
            part = part._replace(out=part.out.to(q.dtype))
        if sinks is not None:
            self._device.add_sinks(self._exchange.own(part), sinks)
        return self._exchange.merge(layer, part)
