"""Merges partials from other instances or calls into a total."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.attention.softmax import join_pair
from loong.kernels.contract import Dims
from loong.kernels.partial import Partial

_NUM_ROWS = 16  # heads of tokens a program


def merge_into(total: Partial, parts: Partial, rows: Tensor | None = None) -> None:
    """Merge N partials of the same tokens into `total`; see `reference.merge_into`.

    Contract:
        total: out [A, H, D] and lse [A, H], float32, contiguous; changed. Where lse is -inf, out may be
            uninitialized.
        parts: out [N, T, H, D] of float32 or less, heads contiguous, and lse [N, T, H] float32, with any
            other strides: one message may contain both. Where lse is -inf, out may be uninitialized.
        rows [T] int64, distinct or below 0: token t goes to row rows[t] of `total`, or is left out. None: to
            row t, and then A = T.
        Allocates nothing.
    """
    dims = Dims()
    letter = "T" if rows is None else "A"
    dims.bind("total.out", total.out, f"{letter} H D", torch.float32)
    dims.bind("total.lse", total.lse, f"{letter} H", torch.float32)
    dims.bind("parts.out", parts.out, "N T H D", is_contiguous=False)
    dims.bind("parts.lse", parts.lse, "N T H", torch.float32, is_contiguous=False)
    if rows is not None:
        dims.bind("rows", rows, "T", torch.int64)
    if parts.out.stride(-1) != 1:
        raise ValueError(f"parts.out must have contiguous heads, got strides {parts.out.stride()}")
    num_rows = dims["T"] * dims["H"]
    if num_rows == 0:
        return
    part_stride = parts.out.stride(0) if dims["N"] > 1 else 0  # one compiled kernel for any T
    _merge_rows[(triton.cdiv(num_rows, _NUM_ROWS),)](
        *total,
        *parts,
        rows,
        num_rows,
        part_stride,
        *parts.out.stride()[1:3],
        *parts.lse.stride(),
        num_parts=dims["N"],
        num_heads=dims["H"],
        head_dim=dims["D"],
        width=triton.next_power_of_2(dims["D"]),
        rows_at_once=_NUM_ROWS,
    )


@triton.jit(
    do_not_specialize=["num_rows", "lse_part_stride", "lse_token_stride", "lse_head_stride"],
    do_not_specialize_on_alignment=["part_lse"],
)
def _merge_rows(
    total_out: tl.tensor,
    total_lse: tl.tensor,
    part_out: tl.tensor,
    part_lse: tl.tensor,
    rows: tl.tensor,
    num_rows: tl.tensor,
    out_part_stride: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    lse_part_stride: tl.tensor,
    lse_token_stride: tl.tensor,
    lse_head_stride: tl.tensor,
    num_parts: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    rows_at_once: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * rows_at_once + tl.arange(0, rows_at_once)).to(tl.int64)
    is_row = row < num_rows
    token, head = row // num_heads, row % num_heads
    place = token
    if rows is not None:
        place = tl.load(rows + token, is_row, -1)
        is_row = place >= 0
    place = place * num_heads + head
    dim = tl.arange(0, width)
    is_element = is_row[:, None] & (dim < head_dim)[None, :]
    elements = total_out + place[:, None] * head_dim + dim[None, :]
    lse = tl.load(total_lse + place, is_row, float("-inf"))
    out = tl.load(elements, is_element & (lse > float("-inf"))[:, None], 0.0)
    part_out += (token * out_token_stride + head * out_head_stride)[:, None] + dim[None, :]
    part_lse += token * lse_token_stride + head * lse_head_stride
    for part in tl.static_range(num_parts):
        new_lse = tl.load(part_lse + part * lse_part_stride, is_row, float("-inf"))
        new_out = tl.load(part_out + part * out_part_stride, is_element, 0.0).to(tl.float32)
        new_out = tl.where((new_lse > float("-inf"))[:, None], new_out, 0.0)
        out, lse = join_pair(out, lse, new_out, new_lse)
    tl.store(elements, out, is_element)
    tl.store(total_lse + place, lse, is_row)
