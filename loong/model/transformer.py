"""The decoder: one forward pass that serves every family in `ModelConfig`."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loong.kernels import apply_rotary, rms_norm, silu_and_mul
from loong.model.parameters import LayerParameters, Parameters
from loong.model.rope import make_rotary
from loong.model.tensor_parallel import Shard, TensorParallel


class Attention(Protocol):
    """What the decoder leaves to others: which KV a token attends to, where it is, and where it goes."""

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        """Store k and v [T, K, D] and return attention [T, H, D], all in the model's dtype, of this rank.

        q and k are rotated already. v may be a strided view.
        """


class Decoder:
    """A decoder-only transformer; inference only, and without any state between calls."""

    def __init__(self, shard: Shard, parameters: Parameters, tensor_parallel: TensorParallel) -> None:
        self.shard = shard
        self.parameters = parameters
        self._tensor_parallel = tensor_parallel
        config, device = shard.config, parameters.embedding.device
        self._rotary = make_rotary(config.rope, config.head_dim, config.torch_dtype, device)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, sequence_lengths: Tensor, attention: Attention
    ) -> Tensor:
        """Return hidden states [T, E] after the final norm, the same on every rank.

        input_ids, positions and sequence_lengths are [T] int64; for the last see `Rotary`. T may be 0, and
        `attention` is called all the same.
        """
        eps = self.shard.config.rms_norm_eps
        hidden = F.embedding(input_ids, self.parameters.embedding)
        cos, sin = self._rotary(positions, sequence_lengths)
        for index, layer in enumerate(self.parameters.layers):
            q, k, v = self._project(layer, rms_norm(hidden, layer.attention_norm, eps))
            mixed = attention(index, apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v)
            hidden = hidden + self._tensor_parallel.all_reduce(layer.o(mixed.flatten(1)))
            gate, up = layer.gate_up(rms_norm(hidden, layer.mlp_norm, eps)).chunk(2, dim=-1)
            hidden = hidden + self._tensor_parallel.all_reduce(layer.down(silu_and_mul(gate, up)))
        return rms_norm(hidden, self.parameters.norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [N, vocab] float32 of hidden states [N, E], the same on every rank."""
        part = F.linear(hidden, self.parameters.lm_head)
        part = F.pad(part, (0, self.shard.padded_vocab_size - part.shape[-1]))
        return self._tensor_parallel.all_gather(part)[:, : self.shard.config.vocab_size].float()

    def _project(self, layer: LayerParameters, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, H, D], k and v [T, K, D] of this rank, before rotary embedding."""
        config, num_heads, num_kv_heads = self.shard.config, self.shard.num_heads, self.shard.num_kv_heads
        heads = layer.qkv(hidden).view(len(hidden), num_heads + 2 * num_kv_heads, config.head_dim)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = rms_norm(k, layer.k_norm, config.rms_norm_eps)
        return q, k, v
