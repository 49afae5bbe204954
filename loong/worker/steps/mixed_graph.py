"""Captured steps of prompts and decodes, of an instance alone or of a group.

Launching the kernels of a small step takes the host longer than the GPU takes to compute it. Here steps of
one size differ only in the contents of memory: ids, positions, slots, masters, and the slots that each row
attends.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from loong.attention.attention_step import AttentionStep
from loong.attention.pool import PoolAttention
from loong.core.plan import Transfer
from loong.kernels import Partial
from loong.model.device import Device
from loong.model.transformer import Decoder
from loong.worker.backend import Backend
from loong.worker.kv.pool import KVPool
from loong.worker.steps.attended_inputs import PromptKeys, is_decode
from loong.worker.steps.captured_forward import CapturedForward
from loong.worker.steps.group_exchange import GroupExchange, NoExchange
from loong.worker.steps.mixed_inputs import GROUP_STEP_SIZES, MAX_ROWS, MixedInputs
from loong.worker.steps.step_inputs import StepInputs

_SIZES = (  # rows of an instance alone
    *(16, 32, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896),
    *(1024, 1152, 1280, 1536, 1792, MAX_ROWS),
)


class MixedGraph:
    """The forward passes of steps in which no KV travels.

    Without `exchange`, only those of this instance alone.
    """

    def __init__(
        self, model: Decoder, pool: KVPool, backend: Backend, exchange: GroupExchange | None
    ) -> None:
        self._pool, self._backend, self._exchange = pool, backend, exchange
        device = backend.device
        num_slots = (pool.num_free + pool.num_used) * (1 if exchange is None else exchange.num_instances)
        limits, windows = backend.graph_limits, pool.layout.windows
        num_words = MixedInputs.num_words(num_slots, limits, windows)
        # two, so that one is filled while the other is still copied
        self._hosts = [MixedInputs(device.host_words(num_words), limits, windows) for _ in range(2)]
        memory = torch.zeros(num_words, dtype=torch.int64, device=device.torch_device)
        self._inputs = MixedInputs(memory, limits, windows)
        self._sizes_alone = _sizes_up_to(limits.most_rows, _SIZES)
        self._sizes_in_groups = _sizes_up_to(limits.most_rows, GROUP_STEP_SIZES)
        self._captured = CapturedForward[_Key](model, backend, self._inputs, MAX_ROWS)

    def capture(self) -> None:
        """Prepare steps of every size, the largest first, whose memory then serves the others."""
        kinds = (False,) if self._backend.least_saved is None else (False, True)
        for size in reversed(self._sizes_alone):
            ways = self._inputs.ways(size)
            for way, is_shared in product(ways, kinds):
                self._capture(_Key(size, way, True, is_alone=True, is_shared=is_shared), NoExchange())
            self._capture(_Key(size, ways[0], False, is_alone=True, is_shared=False), NoExchange())
        if self._exchange is not None:
            self._exchange.begin({})
            for size in reversed(self._sizes_in_groups):
                for way, is_shared in product(self._inputs.ways(size), kinds):
                    self._capture(_Key(size, way, True, is_alone=False, is_shared=is_shared), self._exchange)

    def forward(self, step: AttentionStep, inputs: StepInputs) -> Tensor | None:
        """Return hidden states [T, E] of a step's rows, valid until the next call; None if no graph has room.

        The caller has waited for the step before the last one. Either all members of a group get a result, or
        none.
        """
        batch = step.batch
        num_rows = Counter(dict.fromkeys(batch.group.instance_ids, 0))
        for block in batch.queries:
            num_rows[block.master_id] += len(block.positions)
        most_rows = max(num_rows.values())
        size = self._size_of(step, most_rows)
        way = None if size is None else self._inputs.prompt_keys(step, most_rows)
        if size is None or way is None:
            return None
        is_alone, has_decodes = batch.group.dop == 1, True
        is_shared = self._fill(step, size, inputs)
        if is_alone and not is_shared and way is self._inputs.ways(size)[0]:
            has_decodes = any(is_decode(batch, block) for block in batch.queries)
        if not is_alone and self._exchange is not None:
            self._exchange.begin(num_rows)
        return self._captured.replay(_Key(size, way, has_decodes, is_alone, is_shared), len(inputs.token_ids))

    def _fill(self, step: AttentionStep, size: int, inputs: StepInputs) -> bool:
        """Write a step to the device; return whether its requests read KV together."""
        self._hosts.reverse()
        host = self._hosts[0]
        exchange = NoExchange() if step.batch.group.dop == 1 else self._exchange
        num_instances = 1 if exchange is None else exchange.num_instances
        is_shared = host.fill(step, size, num_instances, inputs)
        self._inputs.copy_from(host)
        if inputs.pending_ids is not None:
            inputs.pending_ids.fill(self._inputs.token_ids)
        return is_shared

    def _size_of(self, step: AttentionStep, num_rows: int) -> int | None:
        """Return the least captured size for `num_rows` rows of each master; None if none has room."""
        is_alone = step.batch.group.dop == 1
        if not is_alone and (self._exchange is None or step.requests(Transfer.KV)):
            return None
        sizes = self._sizes_alone if is_alone else self._sizes_in_groups
        return next((size for size in sizes if size >= num_rows), None)

    def _capture(self, key: "_Key", exchange: GroupExchange) -> None:
        self._captured.capture(key, key.size, partial(self._attention, key, exchange))

    def _attention(self, key: "_Key", exchange: GroupExchange) -> "_QueriesOfAll":
        size, num_instances = key.size, exchange.num_instances
        return _QueriesOfAll(
            self._pool,
            self._inputs.new_slots[:size],
            self._inputs.attention(
                size,
                num_instances,
                key.prompt_keys,
                has_decodes=key.has_decodes,
                is_shared=key.is_shared,
            ),
            self._backend.device,
            exchange,
        )


def _sizes_up_to(most_rows: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ascending `sizes` that steps of up to `most_rows` rows need."""
    return sizes[: bisect_left(sizes, most_rows) + 1] if most_rows else ()


class _Key(NamedTuple):
    """The step that a graph was captured for."""

    size: int  # rows
    prompt_keys: PromptKeys
    has_decodes: bool
    is_alone: bool
    is_shared: bool  # requests read KV together


class _QueriesOfAll:
    """Attention of the queries of all members over this instance's pool; see `transformer.Attention`."""

    def __init__(
        self,
        pool: KVPool,
        new_slots: Tensor,
        attention: Mapping[int | None, PoolAttention],
        device: Device,
        exchange: GroupExchange,
    ) -> None:
        self._pool, self._new_slots, self._attention = pool, new_slots, attention
        self._device, self._exchange = device, exchange

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.layer(layer), self._new_slots

    def __call__(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        queries = self._exchange.gather(layer, q)
        attention = self._attention[self._pool.layout.window(layer)]
        total = Partial.unseen(queries, is_merged=attention.is_merged)
        attention.merge_into(total, queries, self._pool.layer(layer), self._device)
        if sinks is not None:
            self._device.add_sinks(self._exchange.own(total), sinks)
        return self._exchange.merge(layer, total._replace(out=total.out.to(q.dtype)))
