"""Tensor parallelism: the parts of the weights on the ranks of one instance."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loong.core.errors import ConfigError
from loong.core.kv_layout import KVLayout
from loong.model.config import ModelConfig


class TensorParallel(Protocol):
    """The collectives of one instance's ranks. Every rank calls the same ones in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of x. It may overwrite x."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's x, of one shape, concatenated along the last dim in rank order."""


@dataclass(frozen=True, slots=True)
class SingleDevice:
    """A single rank, without communication."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows and columns of the weights on one rank. Raises ConfigError for an unsupported `size`."""

    config: ModelConfig
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"tensor-parallel rank must be in [0, {self.size}), got {self.rank}")
        self.config.kv_layout(self.size)

    @property
    def kv_layout(self) -> KVLayout:
        """The layout of this rank's KV."""
        return self.config.kv_layout(self.size)

    @property
    def num_heads(self) -> int:
        """The query heads of this rank."""
        return self.config.num_heads // self.size

    def zero_queries(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return queries [T, H, D] of this rank, all zeros."""
        shape = (num_tokens, self.num_heads, self.config.head_dim)
        return torch.zeros(shape, dtype=self.config.torch_dtype, device=device)

    @property
    def num_kv_heads(self) -> int:
        """The KV heads of this rank."""
        return self.config.num_kv_heads // self.size

    @property
    def padded_vocab_size(self) -> int:
        """The rows of the output embedding on every rank except the last ones, which may have fewer."""
        return -(-self.config.vocab_size // self.size)

    @property
    def heads(self) -> slice:
        """The query heads among those of all ranks."""
        return self._even(self.num_heads)

    @property
    def q_rows(self) -> slice:
        """The rows of the query projection, and the columns of the output projection."""
        return self._even(self.num_heads * self.config.head_dim)

    @property
    def kv_rows(self) -> slice:
        """The rows of the key and of the value projection."""
        return self._even(self.num_kv_heads * self.config.head_dim)

    @property
    def mlp_rows(self) -> slice:
        """The rows of the gate and of the up projection, and the columns of the down projection."""
        return self._share(self.config.intermediate_size)

    @property
    def expert_rows(self) -> slice:
        """The same of every expert."""
        return self._share(self.config.experts.intermediate_size if self.config.experts else 0)

    @property
    def vocab_rows(self) -> slice:
        """The rows of the output embedding."""
        rows = self._even(self.padded_vocab_size)
        return slice(min(rows.start, self.config.vocab_size), min(rows.stop, self.config.vocab_size))

    def _share(self, width: int) -> slice:
        return slice(width * self.rank // self.size, width * (self.rank + 1) // self.size)

    def _even(self, width: int) -> slice:
        return slice(self.rank * width, (self.rank + 1) * width)
