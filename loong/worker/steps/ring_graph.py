"""Captured steps of prompts on a group, in which KV travels and queries stay.

A ring's hops overlap with attention, but the host launches each of them. For thousands of tokens an instance
that costs nothing. For fewer, launching takes most of the time. Here each member puts its KV into the memory
of all others at once, and one call attends the whole of a prompt. Members compute as many rows as the one
with most tokens. The history that they bring is copied, sent and attended, but has no rows to compute.
"""

from collections import Counter
from functools import partial
from itertools import product

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.core.placement import InstanceId
from loong.core.plan import Transfer
from loong.kernels import Partial
from loong.kernels.shared_table import SharedTable
from loong.model.device import Device
from loong.model.transformer import Decoder
from loong.worker.backend import Backend
from loong.worker.kv.pool import KVPool
from loong.worker.steps.captured_forward import CapturedForward
from loong.worker.steps.group_exchange import KVExchange
from loong.worker.steps.ring_inputs import KV_SIZES, MAX_BLOCKS, RingInputs, RowList, num_brought
from loong.worker.steps.step_inputs import StepInputs


class RingGraph:
    """The forward passes of steps in which only KV travels."""

    def __init__(self, model: Decoder, pool: KVPool, backend: Backend, exchange: KVExchange) -> None:
        self._pool, self._exchange = pool, exchange
        limits, self._device = backend.graph_limits, backend.device
        room, device = min(exchange.max_kv_room, limits.most_kv_room), backend.device.torch_device
        self._most_gathered = limits.most_gathered
        self._sizes = [size for size in KV_SIZES if size <= min(limits.most_kv_rows, room)]

        def words(number: int) -> Tensor:
            return torch.zeros(number, dtype=torch.int64, device=device)

        self._host = RingInputs(backend.device.host_words, exchange.num_instances, room, pool.layout.windows)
        self._inputs = RingInputs(words, exchange.num_instances, room, pool.layout.windows)
        has_both = backend.least_saved is not None and self._inputs.reads_together
        self._kinds = (False, True) if has_both else (False,)
        most_rows = max(self._sizes, default=0)
        self._captured = CapturedForward[tuple[int, bool]](model, backend, self._inputs, most_rows)

    def capture(self) -> None:
        """Prepare steps of every size, the largest first, whose memory then serves the others."""
        self._exchange.begin({})
        for size, is_shared in product(reversed(self._sizes), self._kinds):
            self._captured.capture((size, is_shared), size, partial(self._attention, size, is_shared))

    def forward(self, step: AttentionStep, inputs: StepInputs) -> Tensor | None:
        """See `MixedGraph.forward`."""
        batch = step.batch
        if batch.group.dop == 1 or step.requests(Transfer.QUERY):
            return None
        num_rows, num_blocks, num_tokens = num_brought(step), Counter[InstanceId](), Counter[InstanceId]()
        for block in batch.queries:
            num_blocks[block.master_id] += 1
            num_tokens[block.master_id] += len(block.positions)
        size = next((size for size in self._sizes if size >= max(num_tokens.values())), None)
        has_room = max(num_rows.values()) <= self._host.room and sum(num_rows.values()) <= self._most_gathered
        if size is None or not has_room or max(num_blocks.values()) > MAX_BLOCKS:
            return None
        is_shared = self._host.fill(step, size, inputs)
        self._inputs.copy_from(self._host)
        self._exchange.begin(num_rows)
        return self._captured.replay((size, is_shared), len(inputs.token_ids))

    def _attention(self, size: int, is_shared: bool) -> "_OwnQueries":
        shared = self._inputs.shared(size) if is_shared else None
        return _OwnQueries(self._pool, self._inputs, size, self._device, self._exchange, shared)


class _OwnQueries:
    """Attention of the instance's own queries over the KV of all members; see `transformer.Attention`."""

    def __init__(
        self,
        pool: KVPool,
        inputs: RingInputs,
        size: int,
        device: Device,
        exchange: KVExchange,
        shared: SharedTable | None,
    ) -> None:
        self._pool, self._inputs, self._size, self._device = pool, inputs, size, device
        self._exchange, self._shared = exchange, shared
        self._block: Tensor | None = None  # this layer's block of this instance

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        inputs, pool = self._inputs, self._pool.layer(layer)
        self._block = pool.new_empty(inputs.room, *pool.shape[1:])
        self._copy(pool, self._block, inputs.history)
        return self._block, inputs.new_rows[: self._size]

    def __call__(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        inputs, pool = self._inputs, self._pool.layer(layer)
        assert self._block is not None, "a layer's new KV comes before its queries"
        came = self._exchange.gather_kv(layer, self._block)
        self._copy(came, pool, inputs.kept)
        keys = torch.empty_like(came)
        self._copy(came, keys, inputs.keys)
        table, scale = inputs.tables[self._pool.layout.window(layer)], q.shape[-1] ** -0.5
        total = Partial.unseen(q, is_merged=self._shared is not None)
        if self._shared is not None:
            self._device.attend_shared(q, came, self._shared, scale=scale, total=total)
        self._device.attend_blocks(q, keys, table, scale=scale, total=total)
        if sinks is not None:
            self._device.add_sinks(total, sinks)
        return total.out.to(q.dtype)

    def _copy(self, source: Tensor, target: Tensor, rows: RowList) -> None:
        self._device.copy_rows(
            source, target, source_rows=rows.sources, target_rows=rows.targets, num_rows=rows.count
        )
