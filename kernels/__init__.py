"""Kernels for attention over parts of the KV, and for the other operations of a decoder."""

from loong.kernels.contract import Dims
from loong.kernels.partial import Partial
from loong.kernels.reference import apply_rotary, attend, merge, rms_norm, silu_and_mul

__all__ = ["Dims", "Partial", "apply_rotary", "attend", "merge", "rms_norm", "silu_and_mul"]
