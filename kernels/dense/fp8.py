"""Activations in FP8, with a scale for each group of columns of a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims
from loong.kernels.fp8_rows import FP8, LARGEST, LEAST_SCALE


def quantize_rows(x: Tensor, group_size: int, *, values: Tensor, scales: Tensor) -> None:
    """Write x as `values * scales`; see `reference.quantize_rows`.

    Contract:
        x [T, K], values [T, K] FP8 and scales [T, G] float32, contiguous: G groups of `group_size` columns,
            the last of which may be shorter. Allocates nothing.
    """
    dims = Dims()
    dims.bind("x", x, "T K")
    dims.bind("values", values, "T K", FP8)
    dims.bind("scales", scales, f"T {triton.cdiv(dims['K'], group_size)}", torch.float32)
    if x.numel():
        width = triton.next_power_of_2(min(group_size, dims["K"]))
        _quantize_group[dims["T"], scales.shape[1]](
            x,
            values,
            scales,
            dims["K"],
            group_size,
            largest=LARGEST,
            least_scale=LEAST_SCALE,
            width=width,
            num_warps=min(max(1, width // 512), 16),
            **chain_options(),
        )


@triton.jit
def _quantize_group(
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    size: tl.tensor,
    group_size: tl.tensor,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
    width: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, width)
    column = group * group_size + place
    is_element = (place < group_size) & (column < size)
    follow(is_chained)
    row = tl.load(x + token * size + column, is_element, 0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(row), 0) / largest, least_scale)
    tl.store(values + token * size + column, (row / scale).to(values.dtype.element_ty), is_element)
    tl.store(scales + token * tl.num_programs(1) + group, scale)
    let_next_start(is_chained)
