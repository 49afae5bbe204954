"""Attention in a captured decode step of a group."""

import torch
from torch import Tensor

from loong.kernels import Partial
from loong.kernels.slots import SlotLists
from loong.model.device import Device
from loong.worker.kv.pool import KVPool
from loong.worker.steps.group_exchange import GroupExchange


class GroupAttention:
    """Attention of one query a request over its slots on all that take part; see `transformer.Attention`."""

    def __init__(
        self, pool: KVPool, new_slots: Tensor, lists: SlotLists, device: Device, exchange: GroupExchange
    ) -> None:
        self._pool, self._new_slots, self._lists = pool, new_slots, lists
        self._device, self._exchange = device, exchange

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return where the KV of a layer's new tokens is stored: the pool, and slots [T]."""
        return self._pool.layer(layer), self._new_slots

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """Attend the queries of all masters at once, after one exchange."""
        queries = self._exchange.gather(layer, q)
        lse = torch.empty(queries.shape[:2], dtype=torch.float32, device=q.device)
        part = Partial(torch.empty_like(queries), lse)
        pool = self._pool.layer(layer)
        self._device.attend_slots(queries, pool, self._lists, scale=q.shape[-1] ** -0.5, out=part)
        return self._exchange.merge(layer, part)
