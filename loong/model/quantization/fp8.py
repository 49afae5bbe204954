"""Weights in FP8: values of e4m3, and a scale for each row, or for each row and block of columns."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from loong.kernels.fp8_rows import FP8, LARGEST, LEAST_SCALE


class Fp8Matrix(NamedTuple):
    """A weight is `values * scales`, with a scale for `group_size` columns of a row.

    Experts are another first dimension of both.
    """

    values: Tensor  # [N, K] FP8
    scales: Tensor  # [N, ceil(K / group_size)] float32
    group_size: int

    def dequantized(self) -> Tensor:
        """Return the weight in float32: the definition of what products compute."""
        wide = self.scales.repeat_interleave(self.group_size, dim=-1)
        return self.values.float() * wide[..., : self.values.shape[-1]]

    def to(self, device: torch.device) -> "Fp8Matrix":
        """Return a copy on a device."""
        return Fp8Matrix(self.values.to(device), self.scales.to(device), self.group_size)


def stacked_fp8(parts: Sequence[Fp8Matrix], stack: Callable[[list[Tensor]], Tensor]) -> Fp8Matrix:
    """Return parts of one group size joined by `stack`, such as `torch.cat` by rows."""
    values = stack([part.values for part in parts])
    return Fp8Matrix(values, stack([part.scales for part in parts]), parts[0].group_size)


def multiplies_fp8(device: torch.device) -> bool:
    """Return whether a device has products of FP8: GPUs from Ada and Hopper on. Others dequantize at load."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def quantized_rows(weight: Tensor) -> Fp8Matrix:
    """Return a weight [N, K] with a scale for each row, by which the largest value of the row is 448."""
    wide = weight.float()
    scales = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    return Fp8Matrix((wide / scales).to(FP8), scales, weight.shape[-1])
