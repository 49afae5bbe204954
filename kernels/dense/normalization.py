"""Residual additions and RMS norms, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims


def add_rms_norm(residual: Tensor, weight: Tensor, eps: float, *, out: Tensor, added: Tensor | None) -> None:
    """Add to the residual, in place, and norm the sum; see `reference.add_rms_norm`.

    Contract:
        residual [T, E], changed unless `added` is None; added [T, E]; weight [E]; out [T, E], written. All of
            one dtype and contiguous, but weight may be float32. out may share memory with `added`.
        The sum is rounded to the dtype; the norm is that of `reference.rms_norm`. Allocates nothing.
    """
    dims = Dims()
    dims.bind("residual", residual, "T E")
    dims.bind("weight", weight, "E", torch.float32 if weight.dtype == torch.float32 else residual.dtype)
    dims.bind("out", out, "T E", residual.dtype)
    if added is not None:
        dims.bind("added", added, "T E", residual.dtype)
    if dims["T"] == 0:
        return
    width = triton.next_power_of_2(dims["E"])
    _norm_token[(dims["T"],)](
        residual,
        added,
        weight,
        out,
        eps,
        dims["E"],
        width=width,
        num_warps=max(1, min(16, width // 512)),
        **chain_options(),
    )


@triton.jit
def _norm_token(
    residual: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    size: tl.tensor,
    width: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    let_next_start(is_chained)
    follow(is_chained)
    column = tl.arange(0, width)
    is_column = column < size
    element = tl.program_id(0).to(tl.int64) * size + column
    x = tl.load(residual + element, is_column, 0.0)
    if added is not None:
        x = (x.to(tl.float32) + tl.load(added + element, is_column, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual + element, x, is_column)
    wide = x.to(tl.float32)
    unit = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)).to(weight.dtype.element_ty).to(tl.float32)
    tl.store(out + element, unit * tl.load(weight + column, is_column, 0.0).to(tl.float32), is_column)
