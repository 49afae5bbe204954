"""Online softmax, as the attention kernels share it."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)
_NEVER = tl.constexpr(float("-inf"))


@triton.jit
def attend_tile(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    is_visible: tl.tensor,
    scale: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
) -> tl.tuple:
    """Attend q [R, D] to k [D, S] and v [S, D]; `scale` has LOG2_E in it, so that powers are of two.

    The last three say what R rows have gathered so far, and are returned anew: peak [R] is the largest
    exponent, total [R] the sum of powers relative to it, weighted [R, D] the values times these powers.
    """
    scores = tl.where(is_visible, tl.dot(q, k, input_precision="ieee") * scale, _NEVER)
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == _NEVER, 0.0, new_peak)  # so that a row of -inf becomes 0, not NaN
    powers = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    weighted = tl.dot(powers.to(v.dtype), v, weighted * shrink[:, None], input_precision="ieee")
    return new_peak, total * shrink + tl.sum(powers, 1), weighted


@triton.jit
def normalized(peak: tl.tensor, total: tl.tensor, weighted: tl.tensor) -> tl.tuple:
    """Return out [R, D] and lse [R], a natural log, of what rows have gathered: (0, -inf) if nothing."""
    divisor = tl.maximum(total, 1.0)  # a total is at least 1, or 0
    return weighted / divisor[:, None], (peak + tl.log2(divisor)) * _LN_2


@triton.jit
def join_parts(
    out: tl.tensor, lse: tl.tensor, peak: tl.tensor, total: tl.tensor, weighted: tl.tensor
) -> tl.tuple:
    """Join parts out [N, D], lse [N] of one row to what was joined so far, and return that anew.

    That is peak and total, scalars, and weighted [D], with the meaning of `attend_tile` in powers of e.
    """
    new_peak = tl.maximum(peak, tl.max(lse, 0))
    base = tl.where(new_peak == _NEVER, 0.0, new_peak)
    powers = tl.exp(lse - base)
    shrink = tl.exp(peak - base)
    weighted = weighted * shrink + tl.sum(powers[:, None] * out, 0)
    return new_peak, total * shrink + tl.sum(powers, 0), weighted
