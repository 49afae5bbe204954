"""Captured steps of prompts on a group, in which KV travels and queries stay.

A ring's hops overlap with attention, but the host launches each of them. For thousands of tokens an instance
that costs nothing. For fewer, launching takes most of the time. Here each member puts its KV into the memory
of all others at once, and one call attends the whole of a prompt.
"""

from collections import Counter
from functools import partial

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.core.plan import Transfer
from loong.kernels import Partial
from loong.model.device import Device
from loong.model.transformer import Decoder
from loong.worker.backend import Backend
from loong.worker.kv.pool import KVPool
from loong.worker.steps.captured_forward import CapturedForward
from loong.worker.steps.group_exchange import KVExchange
from loong.worker.steps.ring_inputs import KV_SIZES, MAX_BLOCKS, RingInputs, num_brought
from loong.worker.steps.step_inputs import StepInputs


class RingGraph:
    """The forward passes of steps in which only KV travels."""

    def __init__(self, model: Decoder, pool: KVPool, backend: Backend, exchange: KVExchange) -> None:
        self._pool, self._exchange = pool, exchange
        most_rows = min(exchange.max_kv_rows, backend.graph_limits.most_kv_rows)
        self._sizes = tuple(size for size in KV_SIZES if size <= most_rows)
        self._device = device = backend.device
        num_words = RingInputs.num_words(exchange.num_instances)
        self._host = RingInputs(device.host_words(num_words), exchange.num_instances)
        self._inputs = RingInputs(
            torch.zeros(num_words, dtype=torch.int64, device=device.torch_device), exchange.num_instances
        )
        most_rows = max(self._sizes, default=0)
        self._captured = CapturedForward[int](model, backend, self._inputs, most_rows)

    def capture(self) -> None:
        """Prepare steps of every size, the largest first, whose memory then serves the others."""
        self._exchange.begin({})
        for size in reversed(self._sizes):
            self._captured.capture(size, size, partial(self._attention, size))

    def forward(self, step: AttentionStep, inputs: StepInputs) -> Tensor | None:
        """See `MixedGraph.forward`."""
        batch = step.batch
        if batch.group.dop == 1 or step.requests(Transfer.QUERY):
            return None
        num_rows = num_brought(step)
        size = next((size for size in self._sizes if size >= max(num_rows.values())), None)
        if size is None or max(Counter(block.master_id for block in batch.queries).values()) > MAX_BLOCKS:
            return None
        self._host.fill(step, size, inputs)
        self._inputs.memory.copy_(self._host.memory, non_blocking=True)
        self._exchange.begin(num_rows)
        return self._captured.replay(size, len(inputs.token_ids))

    def _attention(self, size: int) -> "_OwnQueries":
        return _OwnQueries(self._pool, self._inputs, size, self._device, self._exchange)


class _OwnQueries:
    """Attention of the instance's own queries over the KV of all members; see `transformer.Attention`."""

    def __init__(
        self, pool: KVPool, inputs: RingInputs, size: int, device: Device, exchange: KVExchange
    ) -> None:
        self._pool, self._inputs, self._size, self._device = pool, inputs, size, device
        self._exchange, self._num_sources = exchange, exchange.num_instances * size
        self._block: Tensor | None = None  # this layer's block of this instance

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        inputs, pool = self._inputs, self._pool.layer(layer)
        self._block = pool.new_empty(self._size, *pool.shape[1:])
        self._device.copy_rows(
            pool,
            self._block,
            source_rows=inputs.history_slots[: self._size],
            target_rows=inputs.history_rows[: self._size],
        )
        return self._block, inputs.new_rows[: self._size]

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        inputs, pool = self._inputs, self._pool.layer(layer)
        assert self._block is not None, "a layer's new KV comes before its queries"
        came = self._exchange.gather_kv(layer, self._block)
        kept_slots = inputs.kept_slots[: self._num_sources]
        self._device.copy_rows(came, pool, source_rows=None, target_rows=kept_slots)
        keys = torch.empty_like(came)
        key_rows = inputs.key_rows[: self._num_sources]
        self._device.copy_rows(came, keys, source_rows=key_rows, target_rows=None)
        total = Partial.unseen(q, is_merged=False)
        self._device.attend_blocks(q, keys, inputs.table, scale=q.shape[-1] ** -0.5, total=total)
        return total.out
