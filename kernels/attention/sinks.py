"""Merges attention sinks into a total: of each head one more key, which all its queries see."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.attention.softmax import join_pair
from loong.kernels.contract import Dims
from loong.kernels.partial import Partial

_NUM_ROWS = 16  # heads of tokens a program


def add_sinks(total: Partial, sinks: Tensor) -> None:
    """Merge a key of value 0 and of the logit of each head into all rows of `total`, in place; see
    `reference.add_sinks`.

    Contract:
        total: out [T, H, D] and lse [T, H] float32, contiguous. Where lse is -inf, out may be uninitialized.
        sinks [H] float32.
        Computes in float32, and rounds once to the dtype of `total.out`. Allocates nothing.
    """
    dims = Dims()
    dims.bind("total.out", total.out, "T H D")
    dims.bind("total.lse", total.lse, "T H", torch.float32)
    dims.bind("sinks", sinks, "H", torch.float32)
    if num_rows := dims["T"] * dims["H"]:
        _add_sinks[(triton.cdiv(num_rows, _NUM_ROWS),)](
            *total,
            sinks,
            num_rows,
            num_heads=dims["H"],
            head_dim=dims["D"],
            width=triton.next_power_of_2(dims["D"]),
            rows_at_once=_NUM_ROWS,
        )


@triton.jit(do_not_specialize=["num_rows"])
def _add_sinks(
    total_out: tl.tensor,
    total_lse: tl.tensor,
    sinks: tl.tensor,
    num_rows: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    rows_at_once: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * rows_at_once + tl.arange(0, rows_at_once)).to(tl.int64)
    is_row, dim = row < num_rows, tl.arange(0, width)
    is_element = is_row[:, None] & (dim < head_dim)[None, :]
    elements = total_out + row[:, None] * head_dim + dim[None, :]
    lse = tl.load(total_lse + row, is_row, float("-inf"))
    sink = tl.load(sinks + row % num_heads, is_row, 0.0)
    out = tl.load(elements, is_element & (lse > float("-inf"))[:, None], 0.0).to(tl.float32)
    out, lse = join_pair(out, lse, tl.zeros([rows_at_once, width], tl.float32), sink)
    tl.store(elements, out, is_element)
    tl.store(total_lse + row, lse, is_row)
