"""A tile of queries over keys, for all kernels of query blocks.

Rows of a tile are queries of all heads that share a KV head, so each key is read once for all of them. A row
sees the first `limit` keys of its task, so a mask is one comparison, and only the last tiles need it. With a
window it sees only the last of these, and tiles before them are not read.
"""

import triton
import triton.language as tl

from loong.kernels.attention.pool_tile import load_key_scale, load_kv
from loong.kernels.attention.softmax import attend_tile, join_pair, normalized


@triton.jit
def attend_rows(
    q: tl.tensor,
    kv: tl.tensor,
    scales: tl.tensor,
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
    window: tl.constexpr,
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
    hidden = None
    if window is not None:
        hidden = _num_visible(task, query, window)
    out, lse = _attend_keys(
        queries,
        kv,
        scales,
        kv_tiles,
        slots,
        tl.load(task + 2),
        begin,
        end,
        hidden,
        _num_visible(task, query, 0),
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
def _num_visible(task: tl.tensor, query: tl.tensor, distance: tl.constexpr) -> tl.tensor:
    """Return how many keys, always the first ones, are `distance` or more before queries [R].

    These are the keys that a query sees without a window, for 0. Rows after the last query repeat it.
    """
    last = tl.load(task + 1) - 1
    position = tl.load(task + 4) + tl.minimum(query, last) * tl.load(task + 5) - distance
    key_step = tl.load(task + 7)
    num_seen = tl.maximum(position - tl.load(task + 6) + key_step, 0) // key_step
    return tl.minimum(num_seen, tl.load(task + 3)).to(tl.int32)


@triton.jit
def _attend_keys(
    queries: tl.tensor,
    kv: tl.tensor,
    scales: tl.tensor,
    kv_tiles: tl.tensor_descriptor,
    slots: tl.tensor,
    key_row: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    hidden: tl.tensor,
    limit: tl.tensor,
    scale: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tuple:
    """Attend queries [R, D] to keys[begin:end], without keys from `limit` [R] on. `begin` is a tile's start.

    With a window, the first `hidden` [R] keys are left out as well, and tiles of these alone are not read.
    Keys are counted from `key_row`. Returns out [R, D] and lse [R].
    """
    width: tl.constexpr = queries.shape[1]
    peak = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    weighted = tl.zeros([queries.shape[0], width], tl.float32)
    everywhere = tl.full([tile], 1, tl.int1)
    end = tl.minimum(end, tl.max(limit))
    masked_from = tl.maximum(begin, tl.minimum(end, tl.min(limit)) // tile * tile)
    if hidden is not None:  # windows are short: all their tiles are masked
        masked_from = tl.maximum(begin, tl.min(hidden) // tile * tile)
    else:
        for start in tl.range(begin, masked_from, tile):
            k, v, row = _load_tile(
                kv,
                scales,
                queries,
                kv_tiles,
                slots,
                key_row + start,
                everywhere,
                kv_head,
                num_kv_heads,
                head_dim,
                width,
            )
            key_scale = None
            if scales is not None:
                key_scale = load_key_scale(scales, row, everywhere, kv_head, num_kv_heads, head_dim)
            peak, total, weighted = attend_tile(
                queries, k, v, everywhere[None, :], scale, key_scale, peak, total, weighted
            )
    # Without the copy engine, pipelining here makes the assembler serialize the products of the other loop.
    num_stages: tl.constexpr = 1 if kv_tiles is None and hidden is None else None
    for start in tl.range(masked_from, end, tile, num_stages=num_stages):
        key = start + tl.arange(0, tile)
        k, v, row = _load_tile(
            kv,
            scales,
            queries,
            kv_tiles,
            slots,
            key_row + start,
            key < end,
            kv_head,
            num_kv_heads,
            head_dim,
            width,
        )
        is_visible = key[None, :] < limit[:, None]
        if hidden is not None:
            is_visible = is_visible & (key[None, :] >= hidden[:, None])
        key_scale = None
        if scales is not None:
            key_scale = load_key_scale(scales, row, key < end, kv_head, num_kv_heads, head_dim)
        peak, total, weighted = attend_tile(
            queries, k, v, is_visible, scale, key_scale, peak, total, weighted
        )
    return normalized(peak, total, weighted)


@triton.jit
def _load_tile(
    kv: tl.tensor,
    scales: tl.tensor,
    like: tl.tensor,
    kv_tiles: tl.tensor_descriptor,
    slots: tl.tensor,
    first: tl.tensor,
    is_key: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
) -> tl.tuple:
    """Return keys [width, S] and values [S, width], and their rows [S]. Values of missing keys are 0."""
    row = first + tl.arange(0, is_key.shape[0])
    if kv_tiles is not None:  # the copy engine reads whole tiles, including rows after the last key
        k = tl.trans(kv_tiles.load([first.to(tl.int32), kv_head * head_dim]))
        v = kv_tiles.load([first.to(tl.int32), (num_kv_heads + kv_head) * head_dim])
        v = tl.where(is_key[:, None], v, 0.0)
    else:
        if slots is not None:
            row = tl.load(slots + row, is_key, 0)
        k, v = load_kv(kv, scales, like, row, is_key, kv_head, num_kv_heads, head_dim, width)
    return k, v, row
