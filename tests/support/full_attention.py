"""The simplest attention that a decoder can be given: one sequence, whose KV is all in one place."""

import torch
from torch import Tensor

from loong.kernels import attend
from loong.model.config import ModelConfig


class FullAttention:
    """Causal attention of the newest tokens of one sequence over all that it has stored."""

    def __init__(self, config: ModelConfig) -> None:
        self._scale = config.head_dim**-0.5
        self._keys: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        self._values: list[list[Tensor]] = [[] for _ in range(config.num_layers)]

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, /) -> Tensor:
        """Append k and v [T, K, D], and attend q [T, H, D], whose positions are the last T."""
        self._keys[layer_index].append(k)
        self._values[layer_index].append(v)
        keys, values = torch.cat(self._keys[layer_index]), torch.cat(self._values[layer_index])
        positions = torch.arange(len(keys))
        partial = attend(
            q,
            keys,
            values,
            scale=self._scale,
            q_positions=positions[len(keys) - len(q) :],
            kv_positions=positions,
        )
        return partial.out.to(q.dtype)
