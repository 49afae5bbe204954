"""Products of few rows with a large weight, which take as long as reading the weight.

The weight is the left operand of the matrix products, which has 64 rows or more; the right one has as few as
16. Both may be in FP8, with a scale for each of their rows. If tiles would not fill the multiprocessors, they
are cut into pieces. The last program at a tile adds the pieces in their order, so that the result does not
depend on the order of arrival.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loong.kernels.chain import chain_options, follow, let_next_start, prefetch
from loong.kernels.contract import Dims
from loong.kernels.fp8_rows import FP8


class Tiling(NamedTuple):
    """The tiles and the pipeline in which a weight is read."""

    height: int  # of a tile of the weight
    depth: int
    num_stages: int  # tiles in flight
    num_warps: int
    num_ahead: int = 0  # tiles read before x is available
    fill: float = 1.0  # share of the multiprocessors that pieces of tiles fill


class Choice(NamedTuple):
    """The fastest tiling on an H200, for x of at most these rows and weights of at least these sizes."""

    max_num_rows: int
    min_num_columns: int  # of the result: rows of the weight
    tiling: Tiling


_MIN_BATCH = 16
_MAX_NUM_PIECES = 4
_CHOICES = (  # the first match counts; without a match the library is faster
    Choice(4, 0, Tiling(64, 256, 5, 4, num_ahead=2, fill=0.5)),
    Choice(16, 8448, Tiling(64, 128, 5, 4)),
    Choice(16, 0, Tiling(64, 256, 5, 4, num_ahead=2, fill=0.5)),
    Choice(32, 8448, Tiling(64, 128, 4, 4)),
    Choice(32, 0, Tiling(64, 256, 4, 4, num_ahead=2)),
    Choice(64, 8448, Tiling(128, 128, 4, 4)),
    Choice(64, 0, Tiling(64, 128, 6, 4, num_ahead=2)),
    Choice(128, 24576, Tiling(128, 64, 3, 8)),
)
_CHOICES_OF_FP8 = (
    Choice(16, 8448, Tiling(64, 256, 5, 4)),
    Choice(32, 8448, Tiling(128, 256, 4, 8)),
    Choice(32, 0, Tiling(64, 512, 4, 4)),
    Choice(64, 8448, Tiling(128, 256, 4, 8)),
    Choice(64, 0, Tiling(64, 128, 8, 4, num_ahead=4)),
)
_EXACT_DEPTH = 128  # products of FP8 whose sum is not in float32


class Scales(NamedTuple):
    """Scales of rows in FP8, float32."""

    x: Tensor  # [M, 1]
    weight: Tensor  # [N, 1]


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """Space for the pieces of any product, made once, for use by one stream at a time."""

    num_processors: int
    pieces: Tensor  # [num_processors, the most numbers of a tile] float32
    num_done_pieces: Tensor  # [num_processors] int32, of each tile; zeros between calls

    @classmethod
    def empty(cls, num_processors: int, device: torch.device) -> "LinearWorkspace":
        """Return space for weights that are cut for `num_processors` multiprocessors."""
        size = max(
            _batch(choice.max_num_rows) * choice.tiling.height for choice in (*_CHOICES, *_CHOICES_OF_FP8)
        )
        return cls(
            num_processors,
            torch.empty(num_processors, size, dtype=torch.float32, device=device),
            torch.zeros(num_processors, dtype=torch.int32, device=device),
        )


def is_faster(x: Tensor, weight: Tensor) -> bool:
    """Return whether `linear` supports x [M, K] and weight [N, K], and is faster than the library."""
    return _tiling(x, weight) is not None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    workspace: LinearWorkspace,
    out: Tensor,
    scales: Scales | None = None,
) -> None:
    """Write x [M, K] times weight [N, K] transposed, plus bias [N], to out [M, N]; see `reference.linear`.

    Contract:
        All of one dtype of two bytes, contiguous. Raises ValueError where `is_faster` is false.
        scales: x and weight are in FP8, and stand for their values times these; see `reference.fp8_linear`.
        workspace: overwritten.
        Accumulates in float32, in an order that depends on N, K and whether M is above 16, but not otherwise
            on M.
        Allocates nothing.
    """
    dims = Dims()
    dims.bind("x", x, "M K")
    dims.bind("weight", weight, "N K", x.dtype)
    dims.bind("out", out, "M N", x.dtype if scales is None else out.dtype)
    if bias is not None:
        dims.bind("bias", bias, "N", out.dtype)
    if scales is not None:
        dims.bind("x", x, "M K", FP8)
        dims.bind("scales.x", scales.x, "M 1", torch.float32)
        dims.bind("scales.weight", scales.weight, "N 1", torch.float32)
    tiling = _tiling(x, weight)
    if tiling is None:
        raise ValueError(f"no tiling for x {list(x.shape)} of {x.dtype} and weight {list(weight.shape)}")
    if out.numel():
        _multiply(x, weight, bias, scales, workspace, out, tiling)


def _tiling(x: Tensor, weight: Tensor) -> Tiling | None:
    (num_rows, size), num_columns = x.shape, len(weight)
    has_fp8 = x.dtype == weight.dtype == FP8
    if (
        not (has_fp8 or x.dtype.itemsize == 2) or size * x.dtype.itemsize % 16 != 0
    ):  # rows for the copy engine
        return None
    choices = (
        c
        for c in (_CHOICES_OF_FP8 if has_fp8 else _CHOICES)
        if num_rows <= c.max_num_rows and num_columns >= c.min_num_columns
    )
    choice = next(choices, None)
    return None if choice is None else choice.tiling


def _batch(num_rows: int) -> int:
    batch: int = triton.next_power_of_2(num_rows)
    return max(_MIN_BATCH, batch)


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Scales | None,
    workspace: LinearWorkspace,
    out: Tensor,
    tiling: Tiling,
) -> None:
    height, depth, num_stages, num_warps, num_ahead, fill = tiling
    (num_rows, size), num_columns = x.shape, len(weight)
    batch, num_tiles = _batch(num_rows), triton.cdiv(num_columns, height)
    num_pieces = min(max(1, int(fill * workspace.num_processors) // num_tiles), _MAX_NUM_PIECES)
    _multiply_tile[num_tiles, num_pieces](
        TensorDescriptor.from_tensor(x, [batch, depth]),
        TensorDescriptor.from_tensor(weight, [height, depth]),
        weight,
        bias,
        scales.x if scales else None,
        scales.weight if scales else None,
        out,
        workspace.pieces,
        workspace.num_done_pieces,
        num_rows,
        num_columns,
        size,
        batch=batch,
        height=height,
        depth=depth,
        num_pieces=num_pieces,
        exact_depth=_EXACT_DEPTH if scales else None,
        num_ahead=num_ahead if size % (num_pieces * num_ahead * depth or 1) == 0 else 0,
        num_warps=num_warps,
        num_stages=num_stages,
        **chain_options(),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_tile(
    x: tl.tensor_descriptor,
    weight: tl.tensor_descriptor,
    weight_start: tl.tensor,
    bias: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    out: tl.tensor,
    pieces: tl.tensor,
    num_done_pieces: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    size: tl.tensor,
    batch: tl.constexpr,
    height: tl.constexpr,
    depth: tl.constexpr,
    num_pieces: tl.constexpr,
    exact_depth: tl.constexpr,
    num_ahead: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    tile, piece = tl.program_id(0), tl.program_id(1)
    num_steps = tl.cdiv(tl.cdiv(size, depth), num_pieces)
    begin = piece * num_steps * depth
    end = tl.minimum(begin + num_steps * depth, size)
    if num_ahead > 0:
        row = tl.minimum(tl.arange(0, height) + tile * height, num_columns - 1).to(tl.int64)
        prefetch(weight_start + row * size + begin, num_ahead * depth, is_chained)
    follow(is_chained)
    result = tl.zeros([height, batch], tl.float32)
    for start in tl.range(begin, end, depth):
        columns = weight.load([tile * height, start])
        rows = x.load([0, start])
        result = tl.dot(
            columns, tl.trans(rows), result, input_precision="ieee", max_num_imprecise_acc=exact_depth
        )
    let_next_start(is_chained)
    if num_pieces == 1:
        _store_tile(result, bias, x_scales, weight_scales, out, tile, num_rows, num_columns)
    else:
        place = tl.arange(0, height)[:, None] * batch + tl.arange(0, batch)[None, :]
        pieces += tile * (num_pieces * height * batch) + place
        tl.store(pieces + piece * (height * batch), result)
        tl.debug_barrier()
        if tl.atomic_add(num_done_pieces + tile, 1, sem="acq_rel") == num_pieces - 1:
            total = tl.load(pieces, cache_modifier=".cg")  # from the L2 cache: other programs have written it
            for other in tl.static_range(1, num_pieces):
                total += tl.load(pieces + other * (height * batch), cache_modifier=".cg")
            _store_tile(total, bias, x_scales, weight_scales, out, tile, num_rows, num_columns)
            tl.store(num_done_pieces + tile, 0)


@triton.jit
def _store_tile(
    result: tl.tensor,
    bias: tl.tensor,
    x_scales: tl.tensor,
    weight_scales: tl.tensor,
    out: tl.tensor,
    tile: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
) -> None:
    column = tl.arange(0, result.shape[0]) + tile * result.shape[0]
    row = tl.arange(0, result.shape[1])
    if x_scales is not None:
        result *= tl.load(weight_scales + column, column < num_columns, 0.0)[:, None]
        result *= tl.load(x_scales + row, row < num_rows, 0.0)[None, :]
    if bias is not None:
        result += tl.load(bias + column, column < num_columns, 0.0).to(tl.float32)[:, None]
    is_element = (row < num_rows)[None, :] & (column < num_columns)[:, None]
    tl.store(out + row.to(tl.int64)[None, :] * num_columns + column[:, None], result, is_element)
