"""Reads KV in the layout of a pool, [S, 2, K, D], in attention kernels."""

import triton
import triton.language as tl


@triton.jit
def load_kv(
    kv: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    kv_head: tl.tensor,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    width: tl.constexpr,
) -> tl.tuple:
    """Return keys [width, S] and values [S, width] of a head in rows [S] int64; 0 for missing rows."""
    dim = tl.arange(0, width)
    is_dim = dim < head_dim
    keys = kv + (row * (2 * num_kv_heads) + kv_head) * head_dim
    values = keys + num_kv_heads * head_dim
    k = tl.load(keys[None, :] + dim[:, None], is_row[None, :] & is_dim[:, None], 0.0)
    v = tl.load(values[:, None] + dim[None, :], is_row[:, None] & is_dim[None, :], 0.0)
    return k, v
