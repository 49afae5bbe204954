"""The steps from the projection of q, k, v to attention, in one pass: bias, norm, rotation, store."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from loong.kernels.chain import chain_options, follow, let_next_start
from loong.kernels.contract import Dims
from loong.kernels.fp8_rows import LARGEST, LEAST_SCALE
from loong.kernels.kv_rows import bind_rows, fp8_rows, has_fp8

_HEADS_AT_ONCE = 16


def rotate_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q: Tensor,
    kv: Tensor,
    rows: Tensor,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Finish the projections of T tokens: queries to `q`, keys and values to `kv[rows]`.

    Contract:
        qkv [T, H + 2 K, D], contiguous: all queries, then keys, then values.
        cos, sin [T, D] as in `apply_rotary`; bias [H + 2 K, D].
        q_norm and k_norm [D], both or none: weights of an RMS norm of each head, before the rotation.
        All of one dtype, contiguous, but these two may be float32.
        q [T, H, D] and kv [S, 2, K, D], or its rows of bytes in FP8, are written. rows [T] int64, distinct
            rows of kv (not checked), or below 0: key and value of that token are left out.
        Rounds to the dtype after every operation, as `reference.rotate_and_store` does. Allocates nothing.
    """
    dims = Dims()
    dims.bind("q", q, "T H D", qkv.dtype)
    bind_rows(dims, kv, qkv.dtype)
    dims.bind("qkv", qkv, f"T {dims['H'] + 2 * dims['K']} D")
    dims.bind("rows", rows, "T", torch.int64)
    dims.bind("cos", cos, "T D", qkv.dtype)
    dims.bind("sin", sin, "T D", qkv.dtype)
    _check_weights(dims, qkv.dtype, bias, q_norm, k_norm)
    if dims["T"] == 0:
        return
    values, scales = fp8_rows(kv) if has_fp8(kv) else (kv, None)
    _finish_heads[dims["T"], triton.cdiv(qkv.shape[1], _HEADS_AT_ONCE)](
        qkv,
        cos,
        sin,
        q,
        values,
        scales,
        rows,
        bias,
        q_norm,
        k_norm,
        eps,
        num_heads=dims["H"],
        num_kv_heads=dims["K"],
        half=dims["D"] // 2,
        width=triton.next_power_of_2(dims["D"] // 2),
        heads_at_once=_HEADS_AT_ONCE,
        largest=LARGEST,
        least_scale=LEAST_SCALE,
        **chain_options(),
    )


def _check_weights(
    dims: Dims, dtype: torch.dtype, bias: Tensor | None, q_norm: Tensor | None, k_norm: Tensor | None
) -> None:
    if bias is not None:
        dims.bind("bias", bias, f"{dims['H'] + 2 * dims['K']} D", dtype)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given together")
    if q_norm is not None and k_norm is not None:
        norm_dtype = torch.float32 if q_norm.dtype == torch.float32 else dtype
        dims.bind("q_norm", q_norm, "D", norm_dtype)
        dims.bind("k_norm", k_norm, "D", norm_dtype)
    if dims["D"] % 2 != 0:
        raise ValueError(f"the head dim must be even, got {dims['D']}")


@triton.jit
def _finish_heads(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q: tl.tensor,
    kv: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    bias: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    width: tl.constexpr,
    heads_at_once: tl.constexpr,
    largest: tl.constexpr,
    least_scale: tl.constexpr,
    is_chained: tl.constexpr,
) -> None:
    let_next_start(is_chained)
    follow(is_chained)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads_at_once + tl.arange(0, heads_at_once)
    dim = tl.arange(0, width)
    num_all = num_heads + 2 * num_kv_heads
    is_element = (head < num_all)[:, None] & (dim < half)[None, :]
    is_query, is_value = (head < num_heads)[:, None], (head >= num_heads + num_kv_heads)[:, None]

    element = head[:, None] * (2 * half) + dim[None, :]
    a, b = _load_halves(qkv + token * (num_all * 2 * half) + element, is_element, half)
    if bias is not None:
        bias_a, bias_b = _load_halves(bias + element, is_element, half)
        a, b = _round(a + bias_a, qkv), _round(b + bias_b, qkv)
    if q_norm is not None:
        q_weight_a, q_weight_b = _load_halves(q_norm + dim, dim < half, half)
        k_weight_a, k_weight_b = _load_halves(k_norm + dim, dim < half, half)
        weight_a = tl.where(is_query, q_weight_a[None, :], k_weight_a[None, :])
        weight_b = tl.where(is_query, q_weight_b[None, :], k_weight_b[None, :])
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)[:, None]
        a = tl.where(is_value, a, _round(_round(a * inverse, q_norm) * weight_a, qkv))
        b = tl.where(is_value, b, _round(_round(b * inverse, q_norm) * weight_b, qkv))
    angle = token * (2 * half) + dim[None, :]
    c = tl.load(cos + angle, dim[None, :] < half, 0.0).to(tl.float32)
    s = tl.load(sin + angle, dim[None, :] < half, 0.0).to(tl.float32)
    rotated_a = _round(a * c, qkv) - _round(b * s, qkv)
    rotated_b = _round(b * c, qkv) + _round(a * s, qkv)
    a, b = tl.where(is_value, a, rotated_a), tl.where(is_value, b, rotated_b)

    _store_halves(q + token * (num_heads * 2 * half) + element, a, b, is_element & is_query, half)
    row = tl.load(rows + token)
    is_stored = is_element & (head >= num_heads)[:, None] & (row >= 0)
    row_size: tl.constexpr = 2 * num_kv_heads * (2 * half if scales is None else 2 * half + 4)
    if scales is not None:
        a, b = _round(a, qkv), _round(b, qkv)
        scale = tl.maximum(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1) / largest, least_scale)
        place = scales + row * (row_size // 4) + num_kv_heads * half + head - num_heads
        tl.store(place, scale, (head >= num_heads) & (head < num_all) & (row >= 0))
        a, b = (a / scale[:, None]).to(kv.dtype.element_ty), (b / scale[:, None]).to(kv.dtype.element_ty)
    _store_halves(kv + row * row_size + element - num_heads * 2 * half, a, b, is_stored, half)


@triton.jit
def _load_halves(start: tl.tensor, mask: tl.tensor, half: tl.constexpr) -> tl.tuple:
    return tl.load(start, mask, 0.0).to(tl.float32), tl.load(start + half, mask, 0.0).to(tl.float32)


@triton.jit
def _store_halves(start: tl.tensor, a: tl.tensor, b: tl.tensor, mask: tl.tensor, half: tl.constexpr) -> None:
    tl.store(start, a, mask)
    tl.store(start + half, b, mask)


@triton.jit
def _round(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Return float32 rounded to the element type of `like`, as float32."""
    return x.to(like.dtype.element_ty).to(tl.float32)
