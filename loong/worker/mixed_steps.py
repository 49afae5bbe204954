"""Captured steps of prompts and decodes, on an instance alone.

To launch the kernels of a step takes the host longer than the GPU takes for a thousand tokens. Here steps of
one size differ in nothing but the contents of memory that was taken once: ids, positions, slots, and which
rows attend which of these. So each size is captured once. What is computed of rows that a step does not have,
nobody reads.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from loong.attention.pool import PoolAttention
from loong.attention.step import Step
from loong.model.device import Device
from loong.model.transformer import Decoder
from loong.worker.backend import Backend
from loong.worker.kv_pool import KVPool
from loong.worker.mixed_inputs import STEP_SIZES, MixedInputs

_LISTS_A_SLOT = 2.0  # on average, where prompts are shared: so long the lists of a step may be


class MixedSteps:
    """The forward passes of steps whose requests have all of their KV here."""

    def __init__(self, model: Decoder, pool: KVPool, backend: Backend) -> None:
        self._model, self._pool, self._backend = model, pool, backend
        device, config = backend.device, model.shard.config
        num_words = MixedInputs.num_words(int(_LISTS_A_SLOT * (pool.num_free + pool.num_used)))
        self._host = MixedInputs(device.host_words(num_words))
        self._inputs = MixedInputs(torch.zeros(num_words, dtype=torch.int64, device=device.torch_device))
        self._hidden = torch.zeros(
            STEP_SIZES[-1], config.hidden_size, dtype=config.torch_dtype, device=device.torch_device
        )
        self._steps: dict[tuple[int, bool], Callable[[], None]] = {}

    def capture(self) -> None:
        """Prepare steps of every size, the largest first, whose memory then serves the others."""
        for size in reversed(STEP_SIZES):
            for with_decodes in (True, False):
                step = partial(self._step, size, with_decodes)
                self._steps[size, with_decodes] = self._backend.capture(step)

    def forward(self, step: Step, token_ids: Tensor, positions: Tensor, lengths: Tensor) -> Tensor | None:
        """Hidden states [T, E] of a step's rows, until the next call; None if nothing captured has room.

        The columns [T] int64 are those of `Decoder.forward`, on the host. Whoever calls has waited for the
        device since the last call.
        """
        size = self._host.size_for(step) if step.batch.group.dop == 1 else None
        if size is None:
            return None
        num_words = self._host.fill(step, token_ids, positions, lengths)
        self._inputs.memory[:num_words].copy_(self._host.memory[:num_words], non_blocking=True)
        has_decodes = any(len(block.positions) == 1 for block in step.blocks)
        self._steps[size, has_decodes]()
        return self._hidden[: len(token_ids)]

    @torch.inference_mode()
    def _step(self, size: int, with_decodes: bool) -> None:
        inputs = self._inputs
        attention = _AttentionHere(
            self._pool,
            inputs.new_slots[:size],
            inputs.attention(size, has_decodes=with_decodes),
            self._backend.device,
        )
        columns = (inputs.token_ids[:size], inputs.positions[:size], inputs.lengths[:size])
        self._hidden[:size].copy_(self._model.forward(*columns, attention))


class _AttentionHere:
    """Attention over this instance's pool, where all new KV goes; see `transformer.Attention`."""

    def __init__(self, pool: KVPool, new_slots: Tensor, attention: PoolAttention, device: Device) -> None:
        self._pool, self._new_slots = pool, new_slots
        self._attention, self._device = attention, device

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.layer(layer), self._new_slots

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        total = self._device.nothing_seen(q, is_merged=self._attention.is_merged)
        self._attention.merge_into(total, q, self._pool.layer(layer), self._device)
        return total.out.to(q.dtype)
