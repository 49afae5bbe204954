"""The decoder: one forward pass for every family in `ModelConfig`."""

from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loong.model.device import CpuDevice, Device
from loong.model.layer_products import LayerProducts
from loong.model.parameters import Parameters
from loong.model.rope import layer_rotary
from loong.model.tensor_parallel import Shard, TensorParallel

_CPU = CpuDevice()


class Attention(Protocol):
    """The attention of a step, which the decoder calls in each layer. It knows the place of all KV."""

    def new_kv(self, layer_index: int, /) -> tuple[Tensor, Tensor]:
        """Return the tensor for new keys and values, kv [S, ...], and the rows [T] int64 of the
        step's tokens.
        """

    def __call__(self, layer_index: int, q: Tensor, sinks: Tensor | None = None, /) -> Tensor:
        """Return attention [T, H, D] of the rotated q, in its dtype.

        The new KV is in the rows of `new_kv` by now. `sinks` [H] float32: logits of one more key of value 0.
        """


class Decoder:
    """A decoder-only transformer for inference, without state between calls."""

    def __init__(
        self,
        shard: Shard,
        parameters: Parameters,
        tensor_parallel: TensorParallel,
        device: Device = _CPU,
    ) -> None:
        self.shard, self.parameters = shard, parameters
        self._tensor_parallel, self._device = tensor_parallel, device
        self.rotary = layer_rotary(shard.config, device.torch_device)
        self.products = LayerProducts(shard, tensor_parallel, device)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, sequence_lengths: Tensor, attention: Attention
    ) -> Tensor:
        """Return hidden states [T, E] after the final norm, equal on every rank.

        input_ids, positions and sequence_lengths are [T] int64; for the last see `Rotary`. T may be 0;
        `attention` is called even then.
        """
        slices = self.slices(input_ids, positions, sequence_lengths, attention)
        found = next(slices)
        for index, layer in enumerate(self.parameters.layers):
            found = attention(index, found, layer.sinks)  # queries are free before the products that follow
            found = slices.send(found)
        return found

    def slices(
        self, input_ids: Tensor, positions: Tensor, sequence_lengths: Tensor, attention: Attention
    ) -> Generator[Tensor, Tensor]:
        """Yield q of each layer, for which attention is sent, and at last the result; see `forward`."""
        products, hidden = self.products, self.parameters.embedding.rows(input_ids)
        angles = self.rotary(positions, sequence_lengths)
        normed, added = torch.empty_like(hidden), None
        for index, layer in enumerate(self.parameters.layers):
            products.normed(hidden, added, layer.attention_norm, normed)
            attended = yield products.queries(layer, normed, angles[index], *attention.new_kv(index))
            added = products.output(layer, attended)
            del attended  # free before attention of the next layer
            added = products.mlp(layer, hidden, added, normed)
        yield products.normed(hidden, added, self.parameters.norm, normed)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [N, vocab] float32 of hidden states [N, E], equal on every rank; or write them to
        `out`.
        """
        part = self.parameters.lm_head.apply(hidden, self._device)
        if part.shape[-1] < self.shard.padded_vocab_size:
            part = F.pad(part, (0, self.shard.padded_vocab_size - part.shape[-1]))
        logits = self._tensor_parallel.all_gather(part)[:, : self.shard.config.vocab_size]
        return logits.float().contiguous() if out is None else out.copy_(logits)
