"""Chained kernels, which start while the kernel before them in the stream ends.

Starting a kernel takes as long as many kernels of a decode step. A chained kernel starts early and waits on
the device. Meanwhile it may do work that depends on weights alone. It may read or write nothing else before
`follow`. Every program calls `follow`, so that all earlier kernels have ended once this one has.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


def chain_options() -> dict[str, bool]:
    """Return the launch options of a kernel that takes `is_chained` and follows its rules."""
    return {"is_chained": True, "launch_pdl": True} if _can_chain() else {"is_chained": False}


@cache
def _can_chain() -> bool:
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def follow(is_chained: tl.constexpr) -> None:
    """Wait for the end of all kernels before this one."""
    if is_chained:
        cuda.gdc_wait()


@triton.jit
def let_next_start(is_chained: tl.constexpr) -> None:
    """Let the next kernel start, if it is chained, once all programs have called this or ended.

    A kernel that fills the GPU calls it last: the next programs spread evenly only if there is space.
    """
    if is_chained:
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch(rows: tl.tensor, size: tl.constexpr, is_chained: tl.constexpr) -> None:
    """Prefetch `size` elements from each pointer on, a multiple of 16 bytes, without waiting."""
    if is_chained:
        num_bytes: tl.constexpr = size * rows.dtype.element_ty.primitive_bitwidth // 8
        tl.inline_asm_elementwise(
            f"cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; mov.u32 $0, 0;",
            "=r,l",
            [rows],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
