"""Attention of few queries to many keys, cut into pieces to use all multiprocessors.

Tiles of a hundred queries are fewer than multiprocessors, or slightly more, and each tile visits its keys in
sequence. Here a fixed number of programs share the pieces of all tiles. Each multiprocessor runs several, one
after another, and work on other streams can begin whenever one ends.

The length of a piece is computed on the device from the tasks. Of up to 32 ways to cut the longest history,
the fastest is chosen, which is no cut for a short history. Pieces are kept in a workspace until a second
kernel merges those of each row, always in the same order. A tile that is not cut is merged at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loong.kernels.attention.block_tile import attend_rows, merge_rows
from loong.kernels.attention.softmax import join_pair
from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.partial import Partial

_PIECES_A_PROCESSOR = 8  # in the workspace
_PROGRAMS_A_PROCESSOR = 4
_MAX_ROWS = 128  # of a tile of queries
_MOST_CUTS = tl.constexpr(32)  # of the longest history
_START, _MERGE = tl.constexpr(256), tl.constexpr(256)  # cost of each piece, and of the merge, in keys
_AT_ONCE = 4  # pieces
_WARP_ELEMENTS = 512  # of the merged rows


@dataclass(frozen=True, slots=True)
class PieceWorkspace:
    """Space for pieces, made once, for use by one stream at a time."""

    num_processors: int  # on which programs run
    pieces: Partial  # out [N, 1, D] and lse [N, 1], of N rows of tiles
    piece_size: Tensor  # [1] int32, in tiles of keys; 0: nothing was cut

    @classmethod
    def empty(cls, num_processors: int, head_dim: int, device: torch.device) -> "PieceWorkspace":
        """Return space for all tables, attended on `num_processors` multiprocessors."""
        num_rows = _PIECES_A_PROCESSOR * num_processors * _MAX_ROWS
        size = torch.empty(1, dtype=torch.int32, device=device)
        return cls(num_processors, Partial.empty(num_rows, 1, head_dim, device), size)


def attend_pieces(
    q: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    kv_tiles: TensorDescriptor | None,
    slots: Tensor | None,
    tasks: Tensor,
    total: Partial,
    workspace: PieceWorkspace,
    scale: float,
    constants: Mapping[str, int],
    window: int | None,
) -> None:
    """Attend as `attend_blocks`, which has checked the arguments. `scale` includes LOG2_E."""
    num_group_rows = triton.next_power_of_2(constants["group_size"])
    num_warps = max(1, min(4, num_group_rows * constants["width"] // _WARP_ELEMENTS))
    _attend_pieces[(_PROGRAMS_A_PROCESSOR * workspace.num_processors,)](
        q,
        kv,
        scales,
        kv_tiles,
        slots,
        tasks,
        *total,
        *workspace.pieces,
        workspace.piece_size,
        scale,
        q.stride(0),
        len(tasks),
        len(workspace.pieces.lse) // constants["num_rows"],
        workspace.num_processors,
        **constants,
        window=window,
        **chain_options(),
    )
    _merge_cut_rows[len(q), constants["num_kv_heads"]](
        tasks,
        *total,
        *workspace.pieces,
        workspace.piece_size,
        len(tasks),
        **{**constants, "num_warps": num_warps},
        num_group_rows=num_group_rows,
        at_once=_AT_ONCE,
        **chain_options(),
    )


@triton.jit(do_not_specialize=["num_tasks", "most_pieces", "num_processors"])
def _attend_pieces(
    q: tl.tensor,
    kv: tl.tensor,
    scales: tl.tensor,
    kv_tiles: tl.tensor_descriptor,
    slots: tl.tensor,
    tasks: tl.tensor,
    total_out: tl.tensor,
    total_lse: tl.tensor,
    piece_out: tl.tensor,
    piece_lse: tl.tensor,
    piece_size: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    num_tasks: tl.tensor,
    most_pieces: tl.tensor,
    num_processors: tl.tensor,
    max_num_tasks: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    num_rows: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    window: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    follow(is_chained)
    row_tiles, key_tiles = _tiles_of_tasks(tasks, num_tasks, max_num_tasks, group_size, num_rows, tile)
    size = _piece_size(row_tiles, key_tiles, most_pieces, num_processors, num_kv_heads, tile)
    pieces = _num_pieces(key_tiles, size)
    if tl.program_id(0) == 0:
        tl.store(piece_size, tl.where(tl.max(pieces) > 1, size, 0))
    ends = tl.cumsum(row_tiles * pieces)
    number = tl.sum(row_tiles * pieces) * num_kv_heads - 1 - tl.program_id(0)
    while number >= 0:  # from the last tile on, which sees the most keys
        task = tl.sum((ends <= number // num_kv_heads).to(tl.int32))
        its_row_tiles, its_pieces = _of(task, row_tiles), _of(task, pieces)
        index = number // num_kv_heads - _of(task, ends) + its_row_tiles * its_pieces
        piece, row_tile = (
            index // its_row_tiles,
            index % its_row_tiles,
        )  # programs of one piece share its keys
        its_size = tl.cdiv(_of(task, key_tiles), its_pieces) * tile
        out, lse, place = attend_rows(
            q,
            kv,
            scales,
            kv_tiles,
            slots,
            tasks + task.to(tl.int64) * 8,
            row_tile * num_rows,
            piece * its_size,
            (piece + 1) * its_size,
            scale,
            q_stride,
            number % num_kv_heads,
            num_kv_heads,
            group_size,
            num_rows,
            head_dim,
            width,
            tile,
            window,
        )
        if its_pieces == 1:
            merge_rows(total_out, total_lse, place, out, lse, head_dim)
        else:
            row, dim = number.to(tl.int64) * num_rows + tl.arange(0, num_rows), tl.arange(0, width)
            tl.store(piece_out + row[:, None] * head_dim + dim[None, :], out, (dim < head_dim)[None, :])
            tl.store(piece_lse + row, lse)
        number -= tl.num_programs(0)
    let_next_start(is_chained)


@triton.jit
def _tiles_of_tasks(
    tasks: tl.tensor,
    num_tasks: tl.tensor,
    max_num_tasks: tl.constexpr,
    group_size: tl.constexpr,
    num_rows: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tuple:
    """Return the number of tiles of queries, and of tiles of keys, of each task [C]."""
    every = tl.arange(0, max_num_tasks)
    num_queries = tl.load(tasks + every * 8 + 1, every < num_tasks, 0)
    num_keys = tl.load(tasks + every * 8 + 3, every < num_tasks, 0)
    return tl.cdiv(num_queries * group_size, num_rows).to(tl.int32), tl.cdiv(num_keys, tile).to(tl.int32)


@triton.jit
def _piece_size(
    row_tiles: tl.tensor,
    key_tiles: tl.tensor,
    most_pieces: tl.tensor,
    num_processors: tl.tensor,
    num_kv_heads: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """Return the number of tiles of keys in a piece.

    It minimizes the time of all rounds of pieces of the longest history.
    """
    cut = tl.arange(0, _MOST_CUTS)
    size = tl.maximum(tl.cdiv(tl.max(key_tiles), cut + 1), 1)
    num_pieces = tl.sum(row_tiles[:, None] * _num_pieces(key_tiles[:, None], size[None, :]), 0) * num_kv_heads
    rounds = tl.cdiv(num_pieces, num_processors).to(tl.int64)
    time = rounds * (size * tile + _START) + tl.where(cut > 0, _MERGE, 0)
    best = tl.argmin(tl.where((cut == 0) | (num_pieces <= most_pieces), time, 1 << 62), 0)
    return _of(best, size)


@triton.jit
def _num_pieces(key_tiles: tl.tensor, size: tl.tensor) -> tl.tensor:
    return tl.maximum(tl.cdiv(key_tiles, size), 1)


@triton.jit
def _of(index: tl.tensor, values: tl.tensor) -> tl.tensor:
    """Return values[index] of values [N]."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0))


@triton.jit(do_not_specialize=["num_tasks"])
def _merge_cut_rows(
    tasks: tl.tensor,
    total_out: tl.tensor,
    total_lse: tl.tensor,
    piece_out: tl.tensor,
    piece_lse: tl.tensor,
    piece_size: tl.tensor,
    num_tasks: tl.tensor,
    max_num_tasks: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    num_rows: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    num_group_rows: tl.constexpr,
    at_once: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    let_next_start(is_chained)
    follow(is_chained)
    size = tl.load(piece_size)
    if size == 0:
        return
    token, kv_head = tl.program_id(0), tl.program_id(1)
    row_tiles, key_tiles = _tiles_of_tasks(tasks, num_tasks, max_num_tasks, group_size, num_rows, tile)
    pieces = _num_pieces(key_tiles, size)
    every = tl.arange(0, max_num_tasks)
    query = token - tl.load(tasks + every * 8, every < num_tasks, 0)
    is_its = (query >= 0) & (query < tl.load(tasks + every * 8 + 1, every < num_tasks, 0))
    its_pieces = tl.sum(tl.where(is_its, pieces, 0))
    if its_pieces > 1:
        its_row_tiles = tl.sum(tl.where(is_its, row_tiles, 0))
        first = tl.sum(tl.where(is_its, tl.cumsum(row_tiles * pieces), 0)) - its_row_tiles * its_pieces
        head = tl.arange(0, num_group_rows)
        is_head = head < group_size
        row = tl.sum(tl.where(is_its, query, 0)) * group_size + head
        dim = tl.arange(0, width)
        is_element = is_head[:, None] & (dim < head_dim)[None, :]
        out = tl.zeros([num_group_rows, width], tl.float32)
        lse = tl.full([num_group_rows], float("-inf"), tl.float32)
        for start in tl.range(0, its_pieces, at_once):
            for number in tl.static_range(at_once):
                piece = start + number
                index = first + piece * its_row_tiles + row // num_rows
                place = (index * num_kv_heads + kv_head).to(tl.int64) * num_rows + row % num_rows
                part_lse = tl.load(piece_lse + place, is_head & (piece < its_pieces), float("-inf"))
                part_out = tl.load(
                    piece_out + place[:, None] * head_dim + dim[None, :],
                    is_element & (piece < its_pieces),
                    0.0,
                )
                out, lse = join_pair(out, lse, part_out, part_lse)
        place = (token.to(tl.int64) * num_kv_heads + kv_head) * group_size + head
        merge_rows(total_out, total_lse, tl.where(is_head, place, -1), out, lse, head_dim)
