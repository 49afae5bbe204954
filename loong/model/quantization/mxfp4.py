"""MXFP4: blocks of 32 values of 4 bits with one scale, a power of two (OCP Microscaling Formats, 2023)."""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK: Final = 32  # values
BYTES_A_BLOCK: Final = BLOCK // 2
_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1; the highest bit is the sign
_BIAS: Final = 127  # of a scale's exponent


def mxfp4_weight(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix [N, 32 G] in float32 of blocks [N, G, 16] and scales [N, G], both uint8.

    The lower bits of a byte come first.
    """
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    byte = torch.arange(256)
    pairs = values[torch.stack((byte & 0x0F, byte >> 4), dim=-1)]
    exponents = scales.int() - _BIAS
    return torch.ldexp(F.embedding(blocks.int(), pairs).flatten(-2), exponents[..., None]).flatten(-2)
