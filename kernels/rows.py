"""Copies the KV of tokens: from a pool, into one, or from a passing block."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.contract import Dims

_MAX_WIDTH = 2048  # elements of a row at once
_NUM_ELEMENTS = 4096  # of a program, at a time
_MOST_PROGRAMS = 2048  # if only the device knows the number of rows


def copy_rows(
    source: Tensor,
    target: Tensor,
    *,
    source_rows: Tensor | None = None,
    target_rows: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> None:
    """Copy the KV of T tokens, `target[target_rows[t]] = source[source_rows[t]]`; see `reference.copy_rows`.

    Contract:
        source [N, ...] and target [S, ...]: rows of one shape and dtype, contiguous, without shared memory.
        source_rows, target_rows [T] int64: target rows are distinct, or below 0 for tokens that are left out;
            all others exist (not checked). None stands for 0 to T - 1, and then that tensor has T rows.
        num_rows [1] int64: the number of tokens to copy, the first ones, up to T; None: all.
        Allocates nothing.
    """
    dims = Dims()
    _bind_rows(dims, "source", source, source_rows, "N ...", source.dtype)
    _bind_rows(dims, "target", target, target_rows, "S ...", source.dtype)
    if source.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"target must have rows {list(source.shape[1:])} as source has, got {list(target.shape[1:])}"
        )
    row_size = source[0].numel() if dims["T"] else 0
    if row_size == 0:
        return
    if num_rows is not None:
        dims.bind("num_rows", num_rows, "1", torch.int64)
    width = min(_MAX_WIDTH, triton.next_power_of_2(row_size))
    rows_at_once = _NUM_ELEMENTS // width
    num_tiles = triton.cdiv(dims["T"], rows_at_once)
    num_programs = num_tiles if num_rows is None else min(num_tiles, _MOST_PROGRAMS)
    _copy_tiles[num_programs, triton.cdiv(row_size, width)](
        source,
        source_rows,
        target,
        target_rows,
        num_rows,
        dims["T"],
        row_size,
        rows_at_once=rows_at_once,
        width=width,
        num_warps=8,
    )


def _bind_rows(
    dims: Dims, name: str, tensor: Tensor, rows: Tensor | None, letters: str, dtype: torch.dtype
) -> None:
    if rows is not None:
        dims.bind(f"{name}_rows", rows, "T", torch.int64)
    dims.bind(name, tensor, "T ..." if rows is None else letters, dtype)


@triton.jit(do_not_specialize=["num_tokens"])
def _copy_tiles(
    source: tl.tensor,
    source_rows: tl.tensor,
    target: tl.tensor,
    target_rows: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    row_size: tl.tensor,
    rows_at_once: tl.constexpr,
    width: tl.constexpr,
) -> None:
    if num_rows is not None:
        num_tokens = tl.minimum(num_tokens, tl.load(num_rows))
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_tokens, rows_at_once), tl.num_programs(0)):
        token = tile * rows_at_once + tl.arange(0, rows_at_once).to(tl.int64)
        column = tl.program_id(1) * width + tl.arange(0, width)
        is_token = token < num_tokens
        to_row, from_row = token, token
        if target_rows is not None:
            to_row = tl.load(target_rows + token, is_token, -1)
            is_token = to_row >= 0
        if source_rows is not None:
            from_row = tl.load(source_rows + token, is_token, 0)
        is_element = is_token[:, None] & (column < row_size)[None, :]
        values = tl.load(source + from_row[:, None] * row_size + column[None, :], is_element)
        tl.store(target + to_row[:, None] * row_size + column[None, :], values, is_element)
