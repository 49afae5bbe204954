"""Integers packed in words: the formats of AWQ and GPTQ, dequantized."""

import torch
from torch import Tensor

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word of each of eight columns


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the integers [..., n * 32 / bits] of words [..., n] int32, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def awq_weight(words: Tensor, zeros: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Return a weight [N, K] float32 of AWQ: words [K, N / 8], zeros [G, N / 8], scales [G, N]."""
    values, offsets = (_awq_columns(packed) for packed in (words, zeros))
    group = torch.arange(len(values)) // group_size
    return ((values - offsets[group]) * scales.float()[group]).T.contiguous()


def gptq_weight(
    words: Tensor, zeros: Tensor, scales: Tensor, group: Tensor, *, bits: int, zero_offset: int
) -> Tensor:
    """Return a weight [N, K] float32 of GPTQ: words [K bits / 32, N], zeros [G, N bits / 32], scales [G, N].

    `group` [K] is that of each row.
    """
    values = unpacked(words.T.contiguous(), bits)  # [N, K]
    offsets = (unpacked(zeros, bits) + zero_offset).float()
    return (values - offsets[group].T) * scales.float()[group].T


def _awq_columns(words: Tensor) -> Tensor:
    places = torch.tensor(_AWQ_PLACES)
    return unpacked(words, 4).view(len(words), -1, 8)[..., places].flatten(-2).float()
