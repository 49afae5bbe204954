"""Kernels that begin while the kernel before them in the stream ends.

Starting a kernel takes as long as many a kernel of a decode step. A chained kernel is started early and waits
on the device, and does meanwhile whatever depends on weights alone. It may read or write nothing else before
`follow`. Every program follows, so that all kernels before have ended once this one has.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


def chain_options() -> dict[str, bool]:
    """Return how to launch a kernel that takes `is_chained` and obeys it."""
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
    """Let the next kernel start, if it is chained, once all programs have come here or ended.

    A kernel that fills the GPU comes here last: programs of the next one spread evenly only if there is room.
    """
    if is_chained:
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch(rows: tl.tensor, size: tl.constexpr, is_chained: tl.constexpr) -> None:
    """Ask for `size` elements from each pointer on, whole 16 bytes of them, and do not wait for them."""
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
