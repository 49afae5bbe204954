"""The random numbers of `reference.uniform`: Philox 4x64 with ten rounds, as NumPy counts."""

import triton
import triton.language as tl

_MULTIPLIER_A, _MULTIPLIER_B = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
_KEY_STEP_A, _KEY_STEP_B = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return the float64 in [0, 1) that belongs to a seed and a position, both int64 and not negative."""
    zero = (seed * 0).to(tl.uint64)
    key_a, key_b = seed.to(tl.uint64), zero
    a, b, c, d = (position + 1).to(tl.uint64), zero, zero, zero
    for _ in tl.static_range(10):
        low_a, high_a = a * _MULTIPLIER_A, tl.umulhi(a, zero + _MULTIPLIER_A)
        low_c, high_c = c * _MULTIPLIER_B, tl.umulhi(c, zero + _MULTIPLIER_B)
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        key_a, key_b = key_a + _KEY_STEP_A, key_b + _KEY_STEP_B
    return (a >> 11).to(tl.float64) * (2.0**-53)
