"""Captured steps of prompts on a group, in which KV travels and queries stay.

A ring's hops overlap with attention, but the host launches each of them. For thousands of tokens an instance
that costs nothing. For fewer, launching takes most of the time. Here each member puts its KV into the memory
of all others at once, and one call attends the whole of a prompt. Members compute as many rows as the one
with most tokens, however much history they bring.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.core.placement import InstanceId
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

_SOME_ROOM = 1024  # for the block of a member; more room takes more copies


class RingSize(NamedTuple):
    """A captured step: the rows that each member computes, and the room for the block that each brings."""

    rows: int
    room: int


def ring_sizes(sizes: Sequence[int]) -> list[RingSize]:
    """Return all that are captured, ascending, given all sizes of a step: for no history, some, and most."""
    return [
        RingSize(rows, room)
        for rows in sizes
        for room in sorted({rows, min(_SOME_ROOM, sizes[-1]), sizes[-1]})
        if room >= rows
    ]


def least_size(captured: Sequence[RingSize], most_tokens: int, most_brought: int) -> RingSize | None:
    """Return the first of the ascending `captured` with room, which has the fewest rows; None if none has."""
    return next((size for size in captured if size.rows >= most_tokens and size.room >= most_brought), None)


class RingGraph:
    """The forward passes of steps in which only KV travels."""

    def __init__(self, model: Decoder, pool: KVPool, backend: Backend, exchange: KVExchange) -> None:
        self._pool, self._exchange = pool, exchange
        most_rows = min(exchange.max_kv_rows, backend.graph_limits.most_kv_rows)
        self._sizes = ring_sizes([size for size in KV_SIZES if size <= most_rows])
        self._device = device = backend.device
        num_words = RingInputs.num_words(exchange.num_instances)
        self._host = RingInputs(device.host_words(num_words), exchange.num_instances)
        self._inputs = RingInputs(
            torch.zeros(num_words, dtype=torch.int64, device=device.torch_device), exchange.num_instances
        )
        most_rows = max((size.rows for size in self._sizes), default=0)
        self._captured = CapturedForward[RingSize](model, backend, self._inputs, most_rows)

    def capture(self) -> None:
        """Prepare steps of every size, the largest first, whose memory then serves the others."""
        self._exchange.begin({})
        for size in sorted(self._sizes, key=lambda size: (size.room, size.rows), reverse=True):
            self._captured.capture(size, size.rows, partial(self._attention, size))

    def forward(self, step: AttentionStep, inputs: StepInputs) -> Tensor | None:
        """See `MixedGraph.forward`."""
        batch = step.batch
        if batch.group.dop == 1 or step.requests(Transfer.QUERY):
            return None
        num_rows, num_blocks, num_tokens = num_brought(step), Counter[InstanceId](), Counter[InstanceId]()
        for block in batch.queries:
            num_blocks[block.master_id] += 1
            num_tokens[block.master_id] += len(block.positions)
        size = least_size(self._sizes, max(num_tokens.values()), max(num_rows.values()))
        if size is None or max(num_blocks.values()) > MAX_BLOCKS:
            return None
        self._host.fill(step, size.room, inputs)
        self._inputs.memory.copy_(self._host.memory, non_blocking=True)
        self._exchange.begin(num_rows)
        return self._captured.replay(size, len(inputs.token_ids))

    def _attention(self, size: RingSize) -> "_OwnQueries":
        return _OwnQueries(self._pool, self._inputs, size, self._device, self._exchange)


class _OwnQueries:
    """Attention of the instance's own queries over the KV of all members; see `transformer.Attention`."""

    def __init__(
        self, pool: KVPool, inputs: RingInputs, size: RingSize, device: Device, exchange: KVExchange
    ) -> None:
        self._pool, self._inputs, self._size, self._device = pool, inputs, size, device
        self._exchange, self._num_sources = exchange, exchange.num_instances * size.room
        self._block: Tensor | None = None  # this layer's block of this instance

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        inputs, pool = self._inputs, self._pool.layer(layer)
        self._block = pool.new_empty(self._size.room, *pool.shape[1:])
        self._device.copy_rows(
            pool,
            self._block,
            source_rows=inputs.history_slots[: self._size.room],
            target_rows=inputs.history_rows[: self._size.room],
        )
        return self._block, inputs.new_rows[: self._size.rows]

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
