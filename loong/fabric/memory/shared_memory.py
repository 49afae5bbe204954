"""Memory that other processes of the host can write into, whatever device it lies on."""

from typing import Protocol

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
