"""Prefill: blocks of queries over rows of KV, with each result merged into `total`.

One program attends one tile of queries, or, with a workspace, one piece of the keys of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loong.kernels.attention.block_pieces import PieceWorkspace, attend_pieces
from loong.kernels.attention.block_tile import attend_rows, merge_rows
from loong.kernels.attention.softmax import LOG2_E, MIN_WIDTH
from loong.kernels.contract import Dims
from loong.kernels.kv_rows import bind_rows, fp8_rows, has_fp8
from loong.kernels.partial import Partial

_MAX_TASKS = 64  # of a call: longer tables take several calls, so that one compiled kernel serves all


def attend_blocks(
    q: Tensor,
    kv: Tensor,
    tasks: Tensor,
    *,
    scale: float,
    total: Partial,
    slots: Tensor | None = None,
    workspace: PieceWorkspace | None = None,
    window: int | None = None,
) -> None:
    """Merge the attention of every task's queries to its keys into `total`; see `reference.attend_blocks`.

    Contract:
        q [T, H, D], each token contiguous; kv [S, 2, K, D] of q's dtype, or rows of bytes in FP8, contiguous.
        H is a multiple of K; scale is positive.
        tasks [C, 8] int64, contiguous: lines of `AttendTask`. No query row is in two of them, and rows exist
            in q and kv (not checked).
        slots [N] int64: if given, key row i is row slots[i] of kv.
        total: out [T, H, D] and lse [T, H], contiguous; changed in the rows of the tasks' queries. Float32,
            or out in q's dtype if nothing else is merged into it. Where lse is -inf, out may be
            uninitialized.
        workspace: to cut keys into pieces; needed with slots; overwritten.
        window: of the layer, for which kernels are compiled; other keys are not read.
        Accumulates in float32. Does not wait for the host, and allocates nothing.
    """
    dims = _check(q, kv, tasks, total, slots, workspace)
    for lines in torch.split(tasks, _MAX_TASKS) if dims["T"] else ():
        _attend(q, kv, lines, scale * LOG2_E, total, slots, workspace, dims, window)


def _attend(
    q: Tensor,
    kv: Tensor,
    tasks: Tensor,
    scale: float,
    total: Partial,
    slots: Tensor | None,
    workspace: PieceWorkspace | None,
    dims: Dims,
    window: int | None,
) -> None:
    """Attend up to 64 tasks. `scale` includes LOG2_E."""
    num_tasks = len(tasks)
    if not num_tasks:
        return
    group_size, width = dims.group_size(), max(MIN_WIDTH, triton.next_power_of_2(dims["D"]))
    num_keys = (len(kv) if slots is None else len(slots)) // dims["C"]  # equal for all calls of a turn
    is_short = workspace is None and (dims["T"] * group_size <= 64 or num_keys <= 4096)
    tiling = _tiling(q.dtype, width, is_short=is_short, has_slots=slots is not None)
    constants = {
        **tiling,
        "max_num_tasks": _MAX_TASKS,
        "num_kv_heads": dims["K"],
        "group_size": group_size,
        "head_dim": dims["D"],
        "width": width,
    }
    kv_tiles = scales = None
    if has_fp8(kv):
        kv, scales = fp8_rows(kv)
    elif slots is None and width == dims["D"] and len(kv):
        kv_tiles = TensorDescriptor.from_tensor(kv.flatten(1), [tiling["tile"], width])
    if workspace is not None:
        attend_pieces(q, kv, scales, kv_tiles, slots, tasks, total, workspace, scale, constants, window)
        return
    num_tiles = triton.cdiv(dims["T"] * group_size, tiling["num_rows"])
    _attend_tiles[num_tiles + num_tasks, dims["K"]](
        q, kv, scales, kv_tiles, tasks, *total, scale, q.stride(0), num_tasks, **constants, window=window
    )


def _check(
    q: Tensor,
    kv: Tensor,
    tasks: Tensor,
    total: Partial,
    slots: Tensor | None,
    workspace: PieceWorkspace | None,
) -> Dims:
    dims = Dims()
    dims.bind_rows("q", q, "T H D")
    bind_rows(dims, kv, q.dtype)
    dims.bind("tasks", tasks, "C 8", torch.int64)
    dims.bind("total.out", total.out, "T H D", q.dtype if total.out.dtype == q.dtype else torch.float32)
    dims.bind("total.lse", total.lse, "T H", torch.float32)
    if slots is not None:
        dims.bind("slots", slots, "N", torch.int64)
        if workspace is None:
            raise ValueError("slots need a workspace")
    if workspace is not None:
        dims.bind("workspace.pieces.out", workspace.pieces.out, "P 1 D", torch.float32)
        dims.bind("workspace.pieces.lse", workspace.pieces.lse, "P 1", torch.float32)
        dims.bind("workspace.piece_size", workspace.piece_size, "1", torch.int32)
    return dims


def _tiling(dtype: torch.dtype, width: int, *, is_short: bool, has_slots: bool) -> dict[str, int]:
    """Return the fastest tiling that fits a multiprocessor: rows of queries and keys, warps and stages.

    Pieces (`block_pieces.py`) are cut for at most 128 rows of queries.
    """
    if dtype == torch.float32:
        best = 32, 32, 4, 2
    elif width > 128:
        best = 128, 64, 8, 2
    elif has_slots:
        best = 128, 64, 8, 6
    elif is_short:
        best = 64, 64, 4, 3
    else:
        best = 128, 128, 8, 3
    return dict(zip(("num_rows", "tile", "num_warps", "num_stages"), best, strict=True))


@triton.jit(do_not_specialize=["num_tasks"])
def _attend_tiles(
    q: tl.tensor,
    kv: tl.tensor,
    scales: tl.tensor,
    kv_tiles: tl.tensor_descriptor,
    tasks: tl.tensor,
    total_out: tl.tensor,
    total_lse: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    num_tasks: tl.tensor,
    max_num_tasks: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    num_rows: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    window: tl.constexpr,
) -> None:
    task, first_row = _task_of_program(tasks, num_tasks, max_num_tasks, group_size, num_rows)
    if first_row >= 0:
        out, lse, place = attend_rows(
            q,
            kv,
            scales,
            kv_tiles,
            None,
            task,
            first_row,
            0,
            tl.load(task + 3).to(tl.int32),
            scale,
            q_stride,
            tl.program_id(1),
            num_kv_heads,
            group_size,
            num_rows,
            head_dim,
            width,
            tile,
            window,
        )
        merge_rows(total_out, total_lse, place, out, lse, head_dim)


@triton.jit
def _task_of_program(
    tasks: tl.tensor,
    num_tasks: tl.tensor,
    max_num_tasks: tl.constexpr,
    group_size: tl.constexpr,
    num_rows: tl.constexpr,
) -> tl.tuple:
    """Return this program's task and the first of its rows; -1 if there are more programs than tiles.

    The last tiles, whose queries see the most keys, come first, so that short work fills the end.
    """
    every = tl.arange(0, max_num_tasks)
    num_queries = tl.load(tasks + every * 8 + 1, every < num_tasks, 0)
    num_tiles = tl.cdiv(num_queries * group_size, num_rows)
    index = tl.sum(num_tiles) - 1 - tl.program_id(0)
    is_before = tl.cumsum(num_tiles) <= index
    first_row = (index - tl.sum(tl.where(is_before, num_tiles, 0))) * num_rows
    return tasks + tl.sum(is_before.to(tl.int64)) * 8, tl.where(index >= 0, first_row, -1)
