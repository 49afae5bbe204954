"""Decode steps of one instance whose input is the output of the step before, all of it on the device.

A step changes nothing but the contents of memory that was taken once, so that a captured step can be replayed
for any requests. A request's slots lie in one list that is long enough for the whole lease; a step writes to
the first slot that has no KV yet and attends all before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from loong.core.request import SamplingParams, TokenId
from loong.kernels import Partial
from loong.kernels.draw_params import DrawParams
from loong.kernels.slots import SlotLists
from loong.model.device import Device
from loong.model.transformer import Decoder
from loong.worker.backend import Backend, Reading
from loong.worker.draw import draw_params
from loong.worker.kv_pool import KVPool

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One request as a lease begins: `token_id` is at position `num_computed`, behind all KV that it has.

    `slots` [n] int64, on the host, are those of its KV and then those of the tokens it may yet compute.
    """

    token_id: TokenId
    num_computed: int
    slots: Tensor
    params: SamplingParams


class DecodeSteps:
    """Steps of up to 512 requests, in a batch of the least size that has room for them."""

    def __init__(self, model: Decoder, pool: KVPool, backend: Backend) -> None:
        self._model, self._pool, self._backend = model, pool, backend
        self._vocab_size = model.shard.config.vocab_size
        device, max_size = backend.device.torch_device, BATCH_SIZES[-1]

        def column(dtype: torch.dtype, size: int = max_size) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._tokens, self._num_computed = column(torch.int64), column(torch.int64)
        self._limits = column(torch.int64)  # of num_computed: beyond, there is no slot, nor anybody who asks
        self._slots = column(torch.int64, pool.num_free + pool.num_used)
        self._starts = column(torch.int64)
        self._cu_seqlens = column(torch.int32, max_size + 1)
        self._draw_params = DrawParams(
            temperature=column(torch.float64),
            top_k=column(torch.int64),
            top_p=column(torch.float64),
            min_p=column(torch.float64),
            seed=column(torch.int64),
            position=column(torch.int64),
        )
        self._largest = column(torch.float32)
        self._steps: dict[int, Callable[[], None]] = {}
        self._size = 0

    def capture(self) -> None:
        """Prepare a step for every batch size, the largest first, whose memory then serves the others."""
        self._limits.zero_()  # so that nothing is stored
        for size in reversed(BATCH_SIZES):
            self._steps[size] = self._backend.capture(partial(self._step, size))

    def begin(self, rows: Sequence[DecodeRow]) -> None:
        """Let the next steps be those of these requests."""
        self._size = next(size for size in BATCH_SIZES if size >= len(rows))
        lengths = torch.tensor([len(row.slots) for row in rows])
        self._limits.zero_()
        self._num_computed.zero_()
        self._load(self._tokens, torch.tensor([row.token_id for row in rows]))
        self._load(self._num_computed, torch.tensor([row.num_computed for row in rows]))
        self._load(self._limits, lengths)
        self._load(self._starts, lengths.cumsum(0) - lengths)
        self._load(self._slots, torch.cat([row.slots for row in rows]))
        positions = [row.num_computed + 1 for row in rows]
        params = draw_params([row.params for row in rows], positions, self._vocab_size)
        for target, values in zip(self._draw_params, params, strict=True):
            self._load(target, values)

    def launch(self) -> Reading:
        """Take the next step; the reading is of its tokens and largest logits, [512] each, in row order."""
        self._steps[self._size]()
        return self._backend.read(self._tokens, self._largest)

    def _load(self, target: Tensor, values: Tensor) -> None:
        target[: len(values)].copy_(self._backend.device.upload(values))

    @torch.inference_mode()
    def _step(self, size: int) -> None:
        tokens, position = self._tokens[:size], self._num_computed[:size]
        cu_seqlens = self._cu_seqlens[: size + 1]
        starts, last = self._starts[:size], len(self._slots) - 1
        has_slot = position < self._limits[:size]
        new_slots = self._slots[(starts + position).clamp(max=last)].where(has_slot, -1)
        num_keys = position + has_slot
        cu_seqlens[1:].copy_(num_keys.cumsum(0))
        lists = SlotLists(self._slots, starts, cu_seqlens)
        attention = _SlotAttention(self._pool, new_slots, lists, self._backend.device)
        logits = self._model.logits(self._model.forward(tokens, position, position + 1, attention))
        params = DrawParams(*(values[:size] for values in self._draw_params))
        params.position.copy_(num_keys)
        self._backend.draw(logits, params, tokens=tokens, largest=self._largest[:size])
        position.copy_(num_keys)


class _SlotAttention:
    """Attention of one query a request over its slots; see `transformer.Attention`."""

    def __init__(self, pool: KVPool, new_slots: Tensor, lists: SlotLists, device: Device) -> None:
        self._pool, self._new_slots, self._lists, self._device = pool, new_slots, lists, device

    def new_kv(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pool.layer(layer), self._new_slots

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        out = Partial(torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
        pool = self._pool.layer(layer)
        self._device.attend_slots(q, pool, self._lists, scale=q.shape[-1] ** -0.5, out=out)
        return out.out
