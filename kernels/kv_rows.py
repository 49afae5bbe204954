"""Rows of keys and values in memory: of heads in the model's dtype, or of bytes, in FP8 with scales."""

from typing import NamedTuple

import torch
from torch import Tensor

from loong.core.kv_layout import SCALE_BYTES
from loong.kernels.contract import Dims
from loong.kernels.fp8_rows import FP8, LARGEST, LEAST_SCALE


class Fp8Rows(NamedTuple):
    """The parts of rows of bytes [S, R]: in each the values, then the scale of each head's key and value."""

    values: Tensor  # [S, R] FP8; the first 2 K D of a row
    scales: Tensor  # [S, R / 4] float32; the last 2 K of a row


def has_fp8(kv: Tensor) -> bool:
    """Return whether rows are of bytes."""
    return kv.dtype == torch.uint8


def num_kv_heads_of(kv: Tensor, head_dim: int) -> int:
    """Return K of rows of either kind."""
    return kv.shape[1] // (2 * (head_dim + SCALE_BYTES)) if has_fp8(kv) else kv.shape[2]


def fp8_rows(kv: Tensor) -> Fp8Rows:
    """Return the same memory as values and as scales."""
    return Fp8Rows(kv.view(FP8), kv.view(torch.float32))


def bind_rows(dims: Dims, kv: Tensor, dtype: torch.dtype) -> Dims:
    """Check rows of S tokens, given H and D: [S, 2, K, D] of `dtype`, or [S, R] of bytes. Bind S and K."""
    if not has_fp8(kv):
        dims.bind("kv", kv, "S 2 K D", dtype)
        return dims
    dims.bind("kv", kv, "S R", torch.uint8)
    token_bytes = 2 * (dims["D"] + SCALE_BYTES)
    if dims["R"] % token_bytes:
        raise ValueError(f"rows of kv must have a multiple of {token_bytes} bytes, got {dims['R']}")
    dims.bind_size("K", dims["R"] // token_bytes)
    return dims


def quantized(kv: Tensor) -> Tensor:
    """Return keys and values [n, 2, K, D] as rows of bytes [n, R]. A head's largest value is 448 scales."""
    wide = kv.float()
    scales = (wide.abs().amax(-1) / LARGEST).clamp(min=LEAST_SCALE)
    values = (wide / scales[..., None]).to(FP8)
    return torch.cat([part.flatten(1).view(torch.uint8) for part in (values, scales)], dim=1)


def dequantized(rows: Tensor, head_dim: int) -> Tensor:
    """Return keys and values [n, 2, K, D] in float32 of rows of bytes [n, R]."""
    num_heads = num_kv_heads_of(rows, head_dim)
    values, scales = torch.split(rows, [2 * num_heads * head_dim, 2 * num_heads * SCALE_BYTES], dim=1)
    wide = values.contiguous().view(FP8).view(len(rows), 2, num_heads, head_dim).float()
    return wide * scales.contiguous().view(torch.float32).view(len(rows), 2, num_heads, 1)
