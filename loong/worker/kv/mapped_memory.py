"""Memory of this host that other processes of the same user can map."""

import mmap
import os
import weakref

import torch
from torch import Tensor

from loong.core.kv_layout import LentSlots


def mapped_memory(num_bytes: int, lent: LentSlots | None) -> tuple[Tensor, str]:
    """Return memory, uint8 [num_bytes], and the path by which other processes map it.

    It is new, or that of a pool which has lent slots. Raises OSError if the process of that pool has ended.
    New memory is freed when this process and all that have mapped it need it no more.
    """
    if lent is not None:
        descriptor = os.open(lent.path, os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8), lent.path
        finally:
            os.close(descriptor)
    descriptor = os.memfd_create("loong-kv")
    os.ftruncate(descriptor, num_bytes)
    mapped = mmap.mmap(descriptor, num_bytes)
    weakref.finalize(mapped, os.close, descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8), f"/proc/{os.getpid()}/fd/{descriptor}"
