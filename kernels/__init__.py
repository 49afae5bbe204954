"""Kernels for attention over parts of the KV, and for the other operations of a decoder."""

from loong.kernels.contract import Dims
from loong.kernels.partial import Partial
from loong.kernels.reference import activate_and_mul, apply_rotary, attend, merge, rms_norm

__all__ = ["Dims", "Partial", "activate_and_mul", "apply_rotary", "attend", "merge", "rms_norm"]
