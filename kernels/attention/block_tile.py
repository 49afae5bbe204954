"""A tile of queries over keys, for all kernels of query blocks.

Rows of a tile are queries of all heads that share a KV head, so each key is read once for all of them. A row
sees the first `limit` keys of its task, so a mask is one comparison, and only the last tiles need it.
"""

import triton
import triton.language as tl

from loong.kernels.attention.pool_tile import load_kv
from loong.kernels.attention.softmax import attend_tile, join_pair, normalized


@triton.jit
def attend_rows(
    q: tl.tensor,
    kv: tl.tensor,
    kv_tiles: tl.tensor_descriptor,
    slots: tl.tensor,
    task: tl.tensor,
    first_row: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    group_size: tl.constexpr,
    num_rows: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tuple:
    """Attend rows of a task from `first_row` on to the visible keys of its keys[begin:end].

    `begin` is a multiple of `tile`. Returns out [R, D], lse [R], and the index of each row among the heads of
    all tokens. The index [R] is int64, and below 0 after the last row.
    """
    row, dim = first_row + tl.arange(0, num_rows), tl.arange(0, width)
    query, head = row // group_size, kv_head * group_size + row % group_size
    is_row = query < tl.load(task + 1)
    is_element = is_row[:, None] & (dim < head_dim)[None, :]
    token = tl.load(task) + query
    queries = tl.load(q + (token * q_stride + head * head_dim)[:, None] + dim[None, :], is_element, 0.0)
    out, lse = _attend_keys(
        queries,
        kv,
        kv_tiles,
        slots,
        tl.load(task + 2),
        begin,
        end,
        _num_visible(task, query),
        scale,
        kv_head,
        num_kv_heads,
        head_dim,
        tile,
    )
    return out, lse, tl.where(is_row, token * (num_kv_heads * group_size) + head, -1)


@triton.jit
def merge_rows(
    total_out: tl.tensor,
    total_lse: tl.tensor,
    place: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    head_dim: tl.constexpr,
) -> None:
    """Merge out [R, D] and lse [R] into rows `place` [R] of the heads of all tokens.

    Rows below 0 are skipped.
    """
    dim = tl.arange(0, out.shape[1])
    is_row = place >= 0
    is_element = is_row[:, None] & (dim < head_dim)[None, :]
    elements = total_out + place[:, None] * head_dim + dim[None, :]
    before_lse = tl.load(total_lse + place, is_row, float("-inf"))
    before_out = tl.load(elements, is_element & (before_lse > float("-inf"))[:, None], 0.0).to(tl.float32)
    out, lse = join_pair(out, lse, before_out, before_lse)
    tl.store(elements, out, is_element)
    tl.store(total_lse + place, lse, is_row)


@triton.jit
def _num_visible(task: tl.tensor, query: tl.tensor) -> tl.tensor:
    """Return how many keys queries [R] see, always the first ones. Rows after the last query repeat it."""
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
    begin: tl.tensor,
    end: tl.tensor,
    limit: tl.tensor,
    scale: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tuple:
    """Attend queries [R, D] to keys[begin:end], without keys from `limit` [R] on. `begin` is a tile's start.

    Keys are counted from `key_row`. Returns out [R, D] and lse [R].
    """
    width: tl.constexpr = queries.shape[1]
    peak = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    weighted = tl.zeros([queries.shape[0], width], tl.float32)
    everywhere = tl.full([tile], 1, tl.int1)
    end = tl.minimum(end, tl.max(limit))
    masked_from = tl.maximum(begin, tl.minimum(end, tl.min(limit)) // tile * tile)
    for start in tl.range(begin, masked_from, tile):
        k, v = _load_tile(
            kv, kv_tiles, slots, key_row + start, everywhere, kv_head, num_kv_heads, head_dim, width
        )
        peak, total, weighted = attend_tile(queries, k, v, everywhere[None, :], scale, peak, total, weighted)
    # Without the copy engine, pipelining here makes the assembler serialize the products of the other loop.
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
    """Return keys [width, S] and values [S, width]. Values of missing keys are 0."""
    if kv_tiles is not None:  # the copy engine reads whole tiles, including rows after the last key
        k = tl.trans(kv_tiles.load([first.to(tl.int32), kv_head * head_dim]))
        v = kv_tiles.load([first.to(tl.int32), (num_kv_heads + kv_head) * head_dim])
        v = tl.where(is_key[:, None], v, 0.0)
    else:
        row = first + tl.arange(0, is_key.shape[0])
        if slots is not None:
            row = tl.load(slots + row, is_key, 0)
        k, v = load_kv(kv, row, is_key, kv_head, num_kv_heads, head_dim, width)
    return k, v
