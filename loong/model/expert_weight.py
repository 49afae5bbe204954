"""The weights of all experts of a layer: each format is one class."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loong.kernels.expert_groups import ExpertGroups
from loong.model.device import Device
from loong.model.quantization.fp8 import Fp8Matrix


class ExpertWeight(Protocol):
    """A linear map of each expert, as one rank holds them."""

    @property
    def num_experts(self) -> int:
        """Return the number of maps."""

    def apply(self, x: Tensor, groups: ExpertGroups, device: Device) -> Tensor:
        """Return each pair mapped by its expert, [P, out], for x [T, in] of tokens or [P, in] of pairs."""

    def zeros(self, num_rows: int) -> Tensor:
        """Return an x of zeros."""


@dataclass(frozen=True, slots=True)
class DenseExperts:
    """Matrices of the model's dtype. See ExpertWeight."""

    weight: Tensor  # [X, out, in]

    @property
    def num_experts(self) -> int:
        """See ExpertWeight."""
        return len(self.weight)

    def apply(self, x: Tensor, groups: ExpertGroups, device: Device) -> Tensor:
        """See ExpertWeight."""
        return device.grouped_linear(x, self.weight, groups)

    def zeros(self, num_rows: int) -> Tensor:
        """See ExpertWeight."""
        return self.weight.new_zeros(num_rows, self.weight.shape[2])


@dataclass(frozen=True, slots=True)
class Fp8Experts:
    """Matrices in FP8, which products multiply by activations in FP8. See ExpertWeight."""

    weight: Fp8Matrix  # values [X, out, in]
    dtype: torch.dtype  # of activations

    @property
    def num_experts(self) -> int:
        """See ExpertWeight."""
        return len(self.weight.values)

    def apply(self, x: Tensor, groups: ExpertGroups, device: Device) -> Tensor:
        """See ExpertWeight."""
        return device.fp8_linear(x, self.weight, groups)

    def zeros(self, num_rows: int) -> Tensor:
        """See ExpertWeight."""
        values = self.weight.values
        return torch.zeros(num_rows, values.shape[2], dtype=self.dtype, device=values.device)
