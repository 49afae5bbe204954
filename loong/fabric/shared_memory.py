"""Memory that other processes of the host can write into, whatever device it lies on."""

import mmap
import os
from typing import Protocol

import torch
from torch import Tensor


class SharedMemory(Protocol):
    """Makes memory that others can open, and opens theirs. Addresses are as this process sees them."""

    def make(self, num_bytes: int) -> tuple[Tensor, int]:
        """Memory of zeros, uint8 [num_bytes], and a file descriptor by which others open it."""

    def open(self, descriptor: int, num_bytes: int) -> int:
        """The address of another process's memory. The descriptor may then be closed.

        It stays valid until it is closed here, even when its maker is gone.
        """

    def close(self, address: int) -> None:
        """Let go of memory that was opened."""

    def words(self, num_words: int, value: int) -> Tensor:
        """Memory of the host that the device reaches, int64 [num_words], all of them `value`."""


class HostMemory:
    """Implements SharedMemory for processors."""

    def __init__(self) -> None:
        self._opened: dict[int, Tensor] = {}

    def make(self, num_bytes: int) -> tuple[Tensor, int]:
        """See SharedMemory."""
        descriptor = os.memfd_create("loong-arena")
        os.ftruncate(descriptor, num_bytes)
        return _mapped(descriptor, num_bytes), descriptor

    def open(self, descriptor: int, num_bytes: int) -> int:
        """See SharedMemory."""
        memory = _mapped(descriptor, num_bytes)
        self._opened[memory.data_ptr()] = memory
        return memory.data_ptr()

    def close(self, address: int) -> None:
        """See SharedMemory."""
        del self._opened[address]

    def words(self, num_words: int, value: int) -> Tensor:
        """See SharedMemory."""
        return torch.full((num_words,), value, dtype=torch.int64, device="cpu")


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
