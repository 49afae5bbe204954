"""Reads KV in the layouts of a pool, [S, 2, K, D] or rows of bytes, in attention kernels."""

import triton
import triton.language as tl


@triton.jit
def load_kv(
    kv: tl.tensor,
    scales: tl.tensor,
    like: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
) -> tl.tuple:
    """Return keys [width, S] and values [S, width] of a head in rows [S] int64; 0 for missing rows.

    `scales` are those of rows in FP8, otherwise None. Then both are in the dtype of `like`, keys still to be
    multiplied by `load_key_scale`.
    """
    dim = tl.arange(0, width)
    is_dim = dim < head_dim
    row_size: tl.constexpr = 2 * num_kv_heads * (head_dim if scales is None else head_dim + 4)
    keys = kv + row * row_size + kv_head * head_dim
    values = keys + num_kv_heads * head_dim
    k = tl.load(keys[None, :] + dim[:, None], is_row[None, :] & is_dim[:, None], 0.0)
    v = tl.load(values[:, None] + dim[None, :], is_row[:, None] & is_dim[None, :], 0.0)
    if scales is not None:
        scale = _key_scales(scales, row, kv_head, num_kv_heads, head_dim) + num_kv_heads
        k = k.to(tl.float32).to(like.dtype)
        v = (v.to(tl.float32) * tl.load(scale, is_row, 0.0)[:, None]).to(like.dtype)
    return k, v


@triton.jit
def load_key_scale(
    scales: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
) -> tl.tensor:
    """Return the factor [S] of a head's keys in rows [S] of FP8."""
    return tl.load(_key_scales(scales, row, kv_head, num_kv_heads, head_dim), is_row, 0.0)


@triton.jit
def _key_scales(
    scales: tl.tensor,
    row: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
) -> tl.tensor:
    """Return the places [S] of these factors; those of values follow after K of them."""
    row_words: tl.constexpr = 2 * num_kv_heads * (head_dim + 4) // 4
    return scales + row * row_words + num_kv_heads * head_dim // 2 + kv_head
