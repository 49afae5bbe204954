"""The weighted sum of what a token's experts return."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims

_WIDTH = 1024  # elements a program


def expert_sum(parts: Tensor, weights: Tensor, *, out: Tensor) -> None:
    """Write the sum over C of `weights * parts` to out [T, E]; see `reference.expert_sum`.

    Contract:
        parts [T, C, E] and out of one dtype, weights [T, C] float32, contiguous.
        Adds in float32, in the order of C. Allocates nothing.
    """
    dims = Dims()
    dims.bind("parts", parts, "T C E")
    dims.bind("weights", weights, "T C", torch.float32)
    dims.bind("out", out, "T E", parts.dtype)
    if out.numel():
        grid = dims["T"], triton.cdiv(dims["E"], _WIDTH)
        _add_parts[grid](parts, weights, out, dims["E"], num_parts=dims["C"], width=_WIDTH, **chain_options())


@triton.jit
def _add_parts(
    parts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    num_parts: tl.constexpr,
    width: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * width + tl.arange(0, width)
    is_column = column < size
    total = tl.zeros([width], tl.float32)
    follow(is_chained)
    for part in tl.static_range(num_parts):
        pair = token * num_parts + part
        weight = tl.load(weights + pair)
        total += weight * tl.load(parts + pair * size + column, is_column, 0.0).to(tl.float32)
    tl.store(out + token * size + column, total, is_column)
    let_next_start(is_chained)
