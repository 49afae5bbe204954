"""Prefill: blocks of queries over rows of KV, each result merged into what the queries have seen before.

Rows of one tile are queries of all heads that share a KV head, so a key is read once for all of them. What a
row sees is the first `limit` keys of its task, so a mask is one comparison and only the last tiles need it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from loong.kernels.contract import Dims
from loong.kernels.partial import Partial
from loong.kernels.pool_tile import load_kv
from loong.kernels.softmax import LOG2_E, MIN_WIDTH, attend_tile, join_pair, normalized

_MIN_TASKS = 64  # that a table is read as having: one kernel serves all that are not longer


def attend_blocks(
    q: Tensor, kv: Tensor, tasks: Tensor, *, scale: float, total: Partial, slots: Tensor | None = None
) -> None:
    """Merge the attention of every task's queries to its keys into `total`; see `reference.attend_blocks`.

    Contract:
        q [T, H, D], each token contiguous; kv [S, 2, K, D] of q's dtype, contiguous; H a multiple of K; scale
            positive.
        tasks [C, 8] int64, contiguous: lines of `AttendTask`, no query row in two of them, within the rows of
            q and kv (not checked). slots [N] int64: where they are given, key row i is row slots[i] of kv.
        total: out [T, H, D] and lse [T, H], contiguous, in float32, or out in q's dtype if nothing else is
            merged into it; changed in the rows of the tasks' queries. Where lse is -inf, out need not have
            been written.
        Accumulates in float32. Needs nothing of the host and allocates nothing.
    """
    dims = _check(q, kv, tasks, total, slots)
    group_size, width = dims.group_size(), max(MIN_WIDTH, triton.next_power_of_2(dims["D"]))
    num_keys = (len(kv) if slots is None else len(slots)) // max(1, dims["C"])
    num_rows, tile, num_warps, num_stages = _tiling(
        q.dtype, width, dims["T"] * group_size, num_keys, slots is not None
    )
    max_num_tiles = triton.cdiv(dims["T"] * group_size, num_rows) + dims["C"]
    if not dims["T"] or not dims["C"]:
        return
    kv_tiles = None
    if slots is None and width == dims["D"] and len(kv):
        kv_tiles = TensorDescriptor.from_tensor(kv.flatten(1), [tile, width])
    _attend_rows[max_num_tiles, dims["K"]](
        q,
        kv,
        kv_tiles,
        slots,
        tasks,
        *total,
        scale * LOG2_E,
        q.stride(0),
        dims["C"],
        max_num_tasks=max(_MIN_TASKS, triton.next_power_of_2(dims["C"])),
        num_kv_heads=dims["K"],
        group_size=group_size,
        num_rows=num_rows,
        head_dim=dims["D"],
        width=width,
        tile=tile,
        num_warps=num_warps,
        num_stages=num_stages,
    )


def _check(q: Tensor, kv: Tensor, tasks: Tensor, total: Partial, slots: Tensor | None) -> Dims:
    dims = Dims()
    dims.bind_rows("q", q, "T H D")
    dims.bind("kv", kv, "S 2 K D", q.dtype)
    dims.bind("tasks", tasks, "C 8", torch.int64)
    dims.bind("total.out", total.out, "T H D", q.dtype if total.out.dtype == q.dtype else torch.float32)
    dims.bind("total.lse", total.lse, "T H", torch.float32)
    if slots is not None:
        dims.bind("slots", slots, "N", torch.int64)
    return dims


def _tiling(
    dtype: torch.dtype, width: int, num_rows: int, num_keys: int, has_slots: bool
) -> tuple[int, int, int, int]:
    """Rows of queries and keys of a tile, warps, and stages: what fits a multiprocessor, and was fastest."""
    if dtype == torch.float32:
        return 32, 32, 4, 2
    if width > 128:
        return 128, 64, 8, 2
    if has_slots:
        return 128, 64, 8, 6
    if num_rows <= 64 or num_keys <= 4096:
        return 64, 64, 4, 3
    return 128, 128, 8, 3


@triton.jit(do_not_specialize=["num_tasks"])
def _attend_rows(
    q: tl.tensor,
    kv: tl.tensor,
    kv_tiles: tl.tensor_descriptor,
    slots: tl.tensor,
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
) -> None:
    task, first_row = _task_of_program(tasks, num_tasks, max_num_tasks, group_size, num_rows)
    if first_row >= 0:
        kv_head = tl.program_id(1)
        row, dim = first_row + tl.arange(0, num_rows), tl.arange(0, width)
        query, head = row // group_size, kv_head * group_size + row % group_size
        is_row = query < tl.load(task + 1)
        is_element = is_row[:, None] & (dim < head_dim)[None, :]
        token = tl.load(task) + query
        queries = tl.load(q + (token * q_stride + head * head_dim)[:, None] + dim[None, :], is_element, 0.0)
        limit = _num_visible(task, query)
        out, lse = _attend_keys(
            queries,
            kv,
            kv_tiles,
            slots,
            tl.load(task + 2),
            limit,
            scale,
            kv_head,
            num_kv_heads,
            head_dim,
            tile,
        )
        place = token * (num_kv_heads * group_size) + head
        elements = total_out + place[:, None] * head_dim + dim[None, :]
        before_lse = tl.load(total_lse + place, is_row, float("-inf"))
        before_out = tl.load(elements, is_element & (before_lse > float("-inf"))[:, None], 0.0).to(tl.float32)
        out, lse = join_pair(out, lse, before_out, before_lse)
        tl.store(elements, out, is_element)
        tl.store(total_lse + place, lse, is_row)


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


@triton.jit
def _num_visible(task: tl.tensor, query: tl.tensor) -> tl.tensor:
    """How many keys queries [R] see, always the first ones. Behind the last query are others like it."""
    last = tl.load(task + 1) - 1
    position = tl.load(task + 4) + tl.minimum(query, last) * tl.load(task + 5)
    key_step = tl.load(task + 7)
    num_seen = tl.maximum(position - tl.load(task + 6) + key_step, 0) // key_step
    return tl.minimum(num_seen, tl.load(task + 3)).to(tl.int32)


@triton.jit
def _attend_keys(
    queries: tl.tensor,
    kv: tl.tensor,
    kv_tiles: tl.tensor_descriptor,
    slots: tl.tensor,
    key_row: tl.tensor,
    limit: tl.tensor,
    scale: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tuple:
    """Attend queries [R, D] to as many keys from `key_row` on as `limit` [R] says: out [R, D], lse [R]."""
    width: tl.constexpr = queries.shape[1]
    peak = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    weighted = tl.zeros([queries.shape[0], width], tl.float32)
    everywhere = tl.full([tile], 1, tl.int1)
    end = tl.max(limit)
    masked_from = tl.min(limit) // tile * tile
    for start in tl.range(0, masked_from, tile):
        k, v = _load_tile(
            kv, kv_tiles, slots, key_row + start, everywhere, kv_head, num_kv_heads, head_dim, width
        )
        peak, total, weighted = attend_tile(queries, k, v, everywhere[None, :], scale, peak, total, weighted)
    # Pipelined without the copy engine, this loop makes the assembler serialize the products of the other.
    num_stages: tl.constexpr = 1 if kv_tiles is None else None
    for start in tl.range(masked_from, end, tile, num_stages=num_stages):
        key = start + tl.arange(0, tile)
        k, v = _load_tile(
            kv, kv_tiles, slots, key_row + start, key < end, kv_head, num_kv_heads, head_dim, width
        )
        is_visible = key[None, :] < limit[:, None]
        peak, total, weighted = attend_tile(queries, k, v, is_visible, scale, peak, total, weighted)
    return normalized(peak, total, weighted)


@triton.jit
def _load_tile(
    kv: tl.tensor,
    kv_tiles: tl.tensor_descriptor,
    slots: tl.tensor,
    first: tl.tensor,
    is_key: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
) -> tl.tuple:
    """Return keys [width, S] and values [S, width]; the values are 0 where there is no key."""
    if kv_tiles is not None:  # the copy engine reads whole tiles, and so rows behind the last key
        k = tl.trans(kv_tiles.load([first.to(tl.int32), kv_head * head_dim]))
        v = kv_tiles.load([first.to(tl.int32), (num_kv_heads + kv_head) * head_dim])
        v = tl.where(is_key[:, None], v, 0.0)
    else:
        row = first + tl.arange(0, is_key.shape[0])
        if slots is not None:
            row = tl.load(slots + row, is_key, 0)
        k, v = load_kv(kv, row, is_key, kv_head, num_kv_heads, head_dim, width)
    return k, v
