"""Products of the tokens of each expert with that expert's weight, in one launch, and products of FP8."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims
from loong.kernels.expert_groups import ExpertGroups
from loong.kernels.fp8_rows import FP8

_WIDTH = 128  # columns of the result that a program computes
_DEPTH_BYTES = 128  # of a row at a time
_HEIGHTS = (16, 64)  # rows that a program takes without experts
_MANY_ROWS, _STAGES = 128, 4  # of a program with twice the warps; tiles in flight


def grouped_linear(x: Tensor, weight: Tensor, groups: ExpertGroups, *, out: Tensor) -> None:
    """Write the products of pairs with the weights of their experts; see `reference.grouped_linear`.

    Contract:
        x [M, K]: a row for each token or for each pair. weight [X, N, K] and out [P, N]. All of one dtype,
            contiguous.
        groups: the P pairs, a multiple of M, of X experts.
        Accumulates in float32, in the order of K. Rows do not depend on one another. Allocates nothing.
    """
    dims = Dims()
    dims.bind("x", x, "M K")
    dims.bind("weight", weight, "X N K", x.dtype)
    dims.bind("out", out, "P N", x.dtype)
    _multiply(dims, x, None, weight, None, 0, groups, out)


def fp8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    *,
    group_size: int,
    groups: ExpertGroups | None,
    out: Tensor,
) -> None:
    """Write products of rows in FP8 with their scales; see `reference.fp8_linear`.

    Contract:
        x [M, K] and weight [X, N, K] FP8; x_scales [M, G] and weight_scales [X, N, G] float32; out [P, N].
            All contiguous. G groups of `group_size` columns, a multiple of 128 unless G is 1.
        groups: as in `grouped_linear`; None: X is 1 and P is M.
        Accumulates in float32: at most 128 products at a time, then these sums. Allocates nothing.
    """
    dims = Dims()
    dims.bind("x", x, "M K", FP8)
    dims.bind("weight", weight, "X N K", FP8)
    dims.bind("out", out, "P N")
    dims.bind("x_scales", x_scales, f"M {triton.cdiv(dims['K'], group_size)}", torch.float32)
    dims.bind("weight_scales", weight_scales, f"X N {x_scales.shape[1]}", torch.float32)
    if group_size % _DEPTH_BYTES and x_scales.shape[1] > 1:
        raise ValueError(f"group_size must be a multiple of {_DEPTH_BYTES}, got {group_size}")
    if groups is None and (dims["X"], dims["P"]) != (1, dims["M"]):
        raise ValueError(f"without groups, X must be 1 and P {dims['M']}, got {dims['X']} and {dims['P']}")
    _multiply(dims, x, x_scales, weight, weight_scales, group_size, groups, out)


def _multiply(
    dims: Dims,
    x: Tensor,
    x_scales: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor | None,
    group_size: int,
    groups: ExpertGroups | None,
    out: Tensor,
) -> None:
    if out.numel() == 0:
        return
    if dims["P"] % dims["M"]:
        raise ValueError(f"pairs must be a multiple of rows, got {dims['P']} and {dims['M']}")
    height = groups.block_size if groups else _HEIGHTS[dims["M"] > _HEIGHTS[0]]
    if groups:
        dims.bind("groups.pairs", groups.pairs, "P", torch.int64)
        dims.bind("groups.starts", groups.starts, f"{dims['X'] + 1}", torch.int64)
    num_blocks = len(groups.block_experts) if groups else triton.cdiv(dims["M"], height)
    _multiply_block[num_blocks, triton.cdiv(dims["N"], _WIDTH)](
        x,
        x_scales,
        weight,
        weight_scales,
        groups.pairs if groups else None,
        groups.starts if groups else None,
        groups.block_experts if groups else None,
        groups.block_starts if groups else None,
        out,
        dims["N"],
        dims["K"],
        dims["P"],
        dims["P"] // dims["M"],
        dims["X"],
        group_size,
        has_one_scale=x_scales is not None and x_scales.shape[1] == 1,
        height=height,
        width=_WIDTH,
        depth=_DEPTH_BYTES // x.dtype.itemsize,
        num_warps=8 if height >= _MANY_ROWS else 4,
        num_stages=_STAGES,
        **chain_options(),
    )


@triton.jit(do_not_specialize=["num_pairs", "pairs_a_row", "num_experts"])
def _multiply_block(
    x: tl.tensor,
    x_scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    block_experts: tl.tensor,
    block_starts: tl.tensor,
    out: tl.tensor,
    num_columns: tl.tensor,
    size: tl.tensor,
    num_pairs: tl.tensor,
    pairs_a_row: tl.tensor,
    num_experts: tl.tensor,
    group_size: tl.tensor,
    has_one_scale: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    follow(is_chained)
    block = tl.program_id(0).to(tl.int64)
    pair = block * height + tl.arange(0, height)
    is_pair = pair < num_pairs
    expert = block * 0
    if pairs is not None:
        expert = tl.load(block_experts + block)
        is_used = expert < num_experts
        place = tl.load(block_starts + block) + tl.arange(0, height)
        is_pair = (place < tl.load(starts + expert + 1, is_used, 0)) & is_used
        pair = tl.load(pairs + place, is_pair, 0)
    if expert < num_experts:
        column = (tl.program_id(1) * width + tl.arange(0, width)).to(tl.int64)
        is_column = column < num_columns
        row, weight_row = pair // pairs_a_row, expert * num_columns + column
        result = tl.zeros([height, width], tl.float32)
        for start in tl.range(0, size, depth):
            k = start + tl.arange(0, depth)
            is_k = k < size
            a = tl.load(x + row[:, None] * size + k[None, :], is_pair[:, None] & is_k[None, :], 0.0)
            b = tl.load(
                weight + weight_row[None, :] * size + k[:, None], is_column[None, :] & is_k[:, None], 0.0
            )
            if x_scales is None:
                result = tl.dot(a, b, result, input_precision="ieee")
            elif has_one_scale:
                result = tl.dot(a, b, result, max_num_imprecise_acc=depth)
            else:
                num_groups, group = tl.cdiv(size, group_size), start // group_size
                a_scale = tl.load(x_scales + row * num_groups + group, is_pair, 0.0)
                b_scale = tl.load(weight_scales + weight_row * num_groups + group, is_column, 0.0)
                result += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        if has_one_scale:
            result *= tl.load(x_scales + row, is_pair, 0.0)[:, None]
            result *= tl.load(weight_scales + weight_row, is_column, 0.0)[None, :]
        is_element = is_pair[:, None] & is_column[None, :]
        tl.store(out + pair[:, None] * num_columns + column[None, :], result, is_element)
    let_next_start(is_chained)
