"""The simplest attention that a decoder can be given: of one sequence with all KV in one place, or none."""

import torch
from torch import Tensor

from loong.kernels import attend
from loong.kernels.reference import add_sinks
from loong.model.tensor_parallel import Shard


class FullAttention:
    """Causal attention of the newest tokens of one sequence over all that it has stored."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._stored: list[list[Tensor]] = [[] for _ in range(shard.config.num_layers)]

    def begin(self, num_tokens: int) -> "FullAttention":
        """Make room for the tokens of the next step."""
        for layer in self._stored:
            layer.append(_empty_kv(self._shard, num_tokens))
        return self

    def new_kv(self, layer_index: int, /) -> tuple[Tensor, Tensor]:
        """Return the newest room, and all its rows."""
        newest = self._stored[layer_index][-1]
        return newest, torch.arange(len(newest))

    def __call__(self, layer_index: int, q: Tensor, sinks: Tensor | None = None, /) -> Tensor:
        """Attend q [T, H, D], whose positions are the last T."""
        kv = torch.cat(self._stored[layer_index])
        positions = torch.arange(len(kv))
        partial = attend(
            q,
            kv[:, 0],
            kv[:, 1],
            scale=q.shape[-1] ** -0.5,
            q_positions=positions[len(kv) - len(q) :],
            kv_positions=positions,
            window=self._shard.kv_layout.window(layer_index),
        )
        if sinks is not None:
            add_sinks(partial, sinks)
        return partial.out.to(q.dtype)


class OwnQueries:
    """No attention at all: queries come back as they went in. `calls` has each call's layer and tokens."""

    def __init__(self, shard: Shard, num_tokens: int) -> None:
        self._kv = _empty_kv(shard, num_tokens)
        self.calls: list[tuple[int, int]] = []

    def new_kv(self, layer_index: int, /) -> tuple[Tensor, Tensor]:
        """Return room that every layer uses."""
        return self._kv, torch.arange(len(self._kv))

    def __call__(self, layer_index: int, q: Tensor, _sinks: Tensor | None = None, /) -> Tensor:
        """Return q."""
        self.calls.append((layer_index, len(q)))
        return q


def _empty_kv(shard: Shard, num_tokens: int) -> Tensor:
    """Return room for the KV of tokens in a layer, so that reading what was never written shows."""
    shape = (num_tokens, 2, shard.num_kv_heads, shard.config.head_dim)
    return torch.full(shape, torch.nan, dtype=shard.config.torch_dtype)
