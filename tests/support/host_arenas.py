"""Arenas without a GPU: memory of the host that several processes map, and threads that move its bytes."""

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from ctypes import memmove
from threading import Semaphore
from time import monotonic_ns, sleep

import torch
from torch import Tensor

from loong.fabric.lanes import Lane
from loong.fabric.memory.arena import Arena, last_epoch
from loong.kernels.exchange.signals import EPOCHS

_POLL_SECONDS = 50e-6
_MOST_QUEUED = 1024  # as a driver's queue has an end, where it blocks who asks for more


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


class ThreadCopyStream:
    """Implements CopyStream for memory of the host, by a thread.

    The caller's own work is done when it calls.
    """

    def __init__(self, arena: Arena, lane: Lane) -> None:
        self._arena, self._patience = arena, arena.deadline(lane)
        self._thread = ThreadPoolExecutor(1, "fabric-lane")
        self._last: Future[None] | None = None
        self._room = Semaphore(_MOST_QUEUED)

    def follow(self) -> None:
        """See CopyStream."""

    def mark(self) -> Callable[[], None]:
        """See CopyStream."""
        last = self._last
        return lambda: None if last is None else last.result()

    def push(self, tensor: Tensor, rank: int, offset: int) -> None:
        """See CopyStream."""
        address = self._arena.host_addresses[rank] + offset
        self._do(lambda: memmove(address, tensor.data_ptr(), tensor.nbytes))

    def pull(self, offset: int, tensor: Tensor) -> None:
        """See CopyStream."""
        address = self._arena.memory.data_ptr() + offset
        self._do(lambda: memmove(tensor.data_ptr(), address, tensor.nbytes))

    def signal(self, members: int, offset: int, epoch: int) -> None:
        """See CopyStream."""
        reported = [address for rank, address in enumerate(self._arena.host_addresses) if members >> rank & 1]
        value = torch.tensor([epoch])

        def report() -> None:
            if self._patience.stop < epoch:
                for address in reported:
                    memmove(address + offset, value.data_ptr(), value.nbytes)

        self._do(report)

    def wait(self, offset: int, epoch: int, source: int) -> None:
        """See CopyStream."""
        flag = self._arena.view(offset, 1, dtype=torch.int64)
        self._do(lambda: self._wait(flag, epoch, source))

    def drain(self) -> None:
        """See CopyStream."""
        self.mark()()

    def close(self) -> None:
        """See CopyStream."""
        self._thread.shutdown()

    def aside(self) -> AbstractContextManager[object]:
        """See CopyStream."""
        return nullcontext()

    def _do(self, work: Callable[[], object]) -> None:
        before = self._last

        def carry_out() -> None:
            try:
                if before is not None:
                    before.result()  # an earlier failure fails this, too
                work()
            finally:
                self._room.release()

        self._room.acquire()
        self._last = self._thread.submit(carry_out)

    def _wait(self, flag: Tensor, epoch: int, source: int) -> None:
        """`loong.kernels.exchange.signals.wait`, for a thread."""
        word, stop, limit = self._patience
        end = monotonic_ns() + limit
        while flag < epoch:
            if monotonic_ns() > end:
                word[1] = source
                word[0] = last_epoch(epoch // EPOCHS)
            if word[0] >= epoch:
                stop.fill_(last_epoch(epoch // EPOCHS))
                return
            sleep(_POLL_SECONDS)
