"""Memory that other processes of the host can write to, on any device."""

from typing import Protocol

from torch import Tensor


class SharedMemory(Protocol):
    """Makes memory that others can map, and maps theirs. Addresses are those of this process."""

    def make(self, num_bytes: int) -> tuple[Tensor, int]:
        """Return memory of zeros, uint8 [num_bytes], and a file descriptor by which others map it."""

    def open(self, descriptor: int, num_bytes: int) -> int:
        """Return the address of another process's memory. The descriptor may then be closed.

        The address stays valid until `close`, even when the other process is gone.
        """

    def close(self, address: int) -> None:
        """Unmap the memory of another process, once all earlier work of the device is done."""

    def words(self, num_words: int, value: int) -> Tensor:
        """Return host memory that the device can access, int64 [num_words], filled with `value`."""
