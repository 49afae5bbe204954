"""Weights that compute their own products: each format of weights is one class."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from loong.model.device import Device
from loong.model.quantization.fp8 import Fp8Matrix


class Weight(Protocol):
    """An affine map, as one rank holds it."""

    def apply(self, x: Tensor, device: Device) -> Tensor:
        """Return x [T, in] mapped to [T, out]."""

    def load_products(self, device: Device, most_rows: int) -> None:
        """Load kernels of `apply` for x of at most `most_rows` rows; see `Device.load_products`."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix of the model's dtype. See Weight."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    def apply(self, x: Tensor, device: Device) -> Tensor:
        """See Weight."""
        return device.linear(x, self.weight, self.bias)

    def load_products(self, device: Device, most_rows: int) -> None:
        """See Weight."""
        device.load_products(self.weight, self.bias, most_rows)


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """A matrix in FP8, which products multiply by activations in FP8. See Weight."""

    weight: Fp8Matrix
    bias: Tensor | None  # [out]
    dtype: torch.dtype  # of activations

    def apply(self, x: Tensor, device: Device) -> Tensor:
        """See Weight."""
        out = device.fp8_linear(x, self.weight)
        return out if self.bias is None else out.add_(self.bias)

    def load_products(self, device: Device, most_rows: int) -> None:
        """See Weight."""
        rows = torch.zeros(
            most_rows, self.weight.values.shape[1], dtype=self.dtype, device=device.torch_device
        )
        num_rows = 1
        while num_rows <= most_rows:
            self.apply(rows[:num_rows], device)
            num_rows *= 2


@dataclass(frozen=True, slots=True)
class Scaled:
    """A weight whose products are multiplied by a factor. See Weight."""

    weight: Weight
    factor: float

    def apply(self, x: Tensor, device: Device) -> Tensor:
        """See Weight."""
        return self.weight.apply(x, device).mul_(self.factor)

    def load_products(self, device: Device, most_rows: int) -> None:
        """See Weight."""
        self.weight.load_products(device, most_rows)


def scaled(weight: Weight, factor: float) -> Weight:
    """Return a weight with a factor, which is no work if it is 1."""
    return weight if factor == 1 else Scaled(weight, factor)


@dataclass(frozen=True, slots=True)
class Embedding:
    """The hidden states of tokens."""

    table: Tensor  # [vocab, E]

    def rows(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states [T, E] of input_ids [T] int64."""
        return F.embedding(input_ids, self.table)


@dataclass(frozen=True, slots=True)
class ScaledEmbedding(Embedding):
    """The same, multiplied by a factor."""

    factor: float

    def rows(self, input_ids: Tensor) -> Tensor:
        """Return the hidden states [T, E] of input_ids [T] int64."""
        return F.embedding(input_ids, self.table).mul_(self.factor)


def embedding_of(table: Tensor, factor: float) -> Embedding:
    """Return the embedding with a factor, rounded to its dtype, which is no work if it is 1."""
    rounded = torch.tensor(factor, dtype=table.dtype, device="cpu").item()
    return Embedding(table) if rounded == 1 else ScaledEmbedding(table, rounded)
