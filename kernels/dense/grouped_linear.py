"""Products of the tokens of each expert with that expert's weight, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.contract import Dims
from loong.kernels.expert_groups import ExpertGroups

_WIDTH = 128  # columns of the result that a program computes
_DEPTH_BYTES = 128  # of a row at a time


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
    dims.bind("groups.pairs", groups.pairs, "P", torch.int64)
    dims.bind("groups.starts", groups.starts, f"{dims['X'] + 1}", torch.int64)
    if out.numel() == 0:
        return
    if dims["P"] % dims["M"]:
        raise ValueError(f"pairs must be a multiple of rows, got {dims['P']} and {dims['M']}")
    _multiply_block[len(groups.block_experts), triton.cdiv(dims["N"], _WIDTH)](
        x,
        weight,
        groups.pairs,
        groups.starts,
        groups.block_experts,
        groups.block_starts,
        out,
        dims["N"],
        dims["K"],
        dims["P"] // dims["M"],
        dims["X"],
        height=groups.block_size,
        width=_WIDTH,
        depth=_DEPTH_BYTES // x.dtype.itemsize,
    )


@triton.jit
def _multiply_block(
    x: tl.tensor,
    weight: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    block_experts: tl.tensor,
    block_starts: tl.tensor,
    out: tl.tensor,
    num_columns: tl.tensor,
    size: tl.tensor,
    pairs_a_row: tl.tensor,
    num_experts: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    expert = tl.load(block_experts + tl.program_id(0))
    if expert < num_experts:
        place = tl.load(block_starts + tl.program_id(0)) + tl.arange(0, height)
        is_pair = place < tl.load(starts + expert + 1)
        pair = tl.load(pairs + place, is_pair, 0)
        column = (tl.program_id(1) * width + tl.arange(0, width)).to(tl.int64)
        is_column = column < num_columns
        rows = x + (pair // pairs_a_row)[:, None] * size
        columns = weight + (expert * num_columns + column)[None, :] * size
        result = tl.zeros([height, width], tl.float32)
        for start in tl.range(0, size, depth):
            k = start + tl.arange(0, depth)
            a = tl.load(rows + k[None, :], is_pair[:, None] & (k < size)[None, :], 0.0)
            b = tl.load(columns + k[:, None], is_column[None, :] & (k < size)[:, None], 0.0)
            result = tl.dot(a, b, result, input_precision="ieee")
        tl.store(
            out + pair[:, None] * num_columns + column[None, :],
            result,
            is_pair[:, None] & is_column[None, :],
        )
