"""The decoder: one forward pass for every family in `ModelConfig`."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loong.model.device import CpuDevice, Device
from loong.model.parameters import LayerParameters, Parameters
from loong.model.rope import make_rotary
from loong.model.tensor_parallel import Shard, TensorParallel

_CPU = CpuDevice()


class Attention(Protocol):
    """The attention of a step, which the decoder calls in each layer. It knows the place of all KV."""

    def new_kv(self, layer_index: int, /) -> tuple[Tensor, Tensor]:
        """Return the tensor for new keys and values, kv [S, ...], and the rows [T] int64 of the
        step's tokens.
        """

    def __call__(self, layer_index: int, q: Tensor, /) -> Tensor:
        """Return attention [T, H, D] of the rotated q, in its dtype.

        The new KV is in the rows of `new_kv` by now.
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
        self.shard = shard
        self.parameters = parameters
        self._tensor_parallel, self._device = tensor_parallel, device
        config = shard.config
        self._rotary = make_rotary(
            config.rope, config.head_dim, config.torch_dtype, device.torch_device, config.scales.scores
        )

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, sequence_lengths: Tensor, attention: Attention
    ) -> Tensor:
        """Return hidden states [T, E] after the final norm, equal on every rank.

        input_ids, positions and sequence_lengths are [T] int64; for the last see `Rotary`. T may be 0;
        `attention` is called even then.
        """
        device, eps = self._device, self.shard.config.rms_norm_eps
        hidden = self.parameters.embedding.rows(input_ids)
        angles = self._rotary(positions, sequence_lengths)
        normed, added = torch.empty_like(hidden), None
        for index, layer in enumerate(self.parameters.layers):
            device.add_rms_norm(hidden, layer.attention_norm, eps, out=normed, added=added)
            q = self._project(layer, normed, angles, *attention.new_kv(index))
            added = layer.o.apply(attention(index, q).flatten(1), device)
            added = self._tensor_parallel.all_reduce(added)
            device.add_rms_norm(hidden, layer.mlp_norm, eps, out=normed, added=added)
            added = layer.mlp.apply(normed, device)
            added = self._tensor_parallel.all_reduce(added)
        device.add_rms_norm(hidden, self.parameters.norm, eps, out=normed, added=added)
        return normed

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

    @torch.inference_mode()
    def load_products(self, most_rows: int, most_logits: int) -> None:
        """Load the kernels of `forward` for at most `most_rows` tokens, and those of `logits`."""
        layer = self.parameters.layers[0]
        for part in (layer.qkv, layer.o, layer.mlp):
            part.load_products(self._device, most_rows)
        self.parameters.lm_head.load_products(self._device, most_logits)

    def _project(
        self, layer: LayerParameters, normed: Tensor, angles: tuple[Tensor, Tensor], kv: Tensor, rows: Tensor
    ) -> Tensor:
        """Return this rank's q [T, H, D], rotated, and write its keys and values to `rows` of kv."""
        config, num_heads = self.shard.config, self.shard.num_heads
        num_all = num_heads + 2 * self.shard.num_kv_heads
        qkv = layer.qkv.apply(normed, self._device).view(len(normed), num_all, config.head_dim)
        q = qkv.new_empty(len(qkv), num_heads, config.head_dim)
        self._device.rotate_and_store(
            qkv,
            *angles,
            q=q,
            kv=kv,
            rows=rows,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        return q
