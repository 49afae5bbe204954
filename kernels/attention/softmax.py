"""Online softmax for the attention kernels."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MIN_WIDTH = 16  # of a head: matrix products need at least as many columns
_LN_2 = tl.constexpr(0.6931471805599453)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def attend_tile(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    is_visible: tl.tensor,
    scale: tl.tensor,
    key_scale: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
) -> tl.tuple:
    """Attend q [R, D] to k [D, S] and v [S, D]. `scale` is positive and includes LOG2_E: powers are of two.

    `key_scale` [S] are factors of keys; None: no factors.

    The last three arguments are the state of R rows, and their new values are returned. peak [R] is the
    largest exponent, total [R] the sum of powers relative to it, weighted [R, D] the values times these
    powers.
    """
    scores = tl.dot(q, k, input_precision="ieee")
    if key_scale is not None:
        scores = scores * key_scale[None, :]
    scores = tl.where(is_visible, scores, _NEVER)
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    base = tl.where(new_peak == _NEVER, 0.0, new_peak)  # so that a row of -inf becomes 0, not NaN
    powers = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(peak - base)
    weighted = tl.dot(powers.to(v.dtype), v, weighted * shrink[:, None], input_precision="ieee")
    return new_peak, total * shrink + tl.sum(powers, 1), weighted


@triton.jit
def normalized(peak: tl.tensor, total: tl.tensor, weighted: tl.tensor) -> tl.tuple:
    """Return out [R, D] and lse [R], a natural log, from the state of rows: (0, -inf) for rows without
    keys.
    """
    divisor = tl.maximum(total, 1.0)  # a total is at least 1, or 0
    return weighted / divisor[:, None], (peak + tl.log2(divisor)) * _LN_2


@triton.jit
def join_pair(out_a: tl.tensor, lse_a: tl.tensor, out_b: tl.tensor, lse_b: tl.tensor) -> tl.tuple:
    """Merge two partials, out [R, D] and lse [R] each."""
    peak = tl.maximum(lse_a, lse_b)
    base = tl.where(peak == _NEVER, 0.0, peak)
    power_a, power_b = tl.exp(lse_a - base), tl.exp(lse_b - base)
    divisor = tl.maximum(power_a + power_b, 1.0)  # the sum is at least 1, or 0
    out = out_a * (power_a / divisor)[:, None] + out_b * (power_b / divisor)[:, None]
    return out, peak + tl.log(divisor)


@triton.jit
def join_parts(
    out: tl.tensor, lse: tl.tensor, peak: tl.tensor, total: tl.tensor, weighted: tl.tensor
) -> tl.tuple:
    """Add parts out [N, D], lse [N] of one row to the state of the row, and return its new values.

    The state is that of `attend_tile`, for one row and with powers of e: two scalars, and [D].
    """
    new_peak = tl.maximum(peak, tl.max(lse, 0))
    base = tl.where(new_peak == _NEVER, 0.0, new_peak)
    powers = tl.exp(lse - base)
    shrink = tl.exp(peak - base)
    weighted = weighted * shrink + tl.sum(powers[:, None] * out, 0)
    return new_peak, total * shrink + tl.sum(powers, 0), weighted
