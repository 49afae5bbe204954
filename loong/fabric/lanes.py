"""What moves bytes between arenas and keeps their flags, in order, beside what the caller computes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from ctypes import memmove
from time import monotonic_ns, sleep
from typing import Protocol

import torch
from torch import Tensor

from loong.fabric.arena import Arena, last_epoch
from loong.fabric.traffic import Plane
from loong.kernels.signals import EPOCHS

_POLL_SECONDS = 50e-6


class Lane(Protocol):
    """Does what it is asked for in the order of the calls, which return at once.

    Ranks are those of the arena, offsets are bytes in one. Flags and epochs: `loong.kernels.signals`.
    """

    def follow(self) -> None:
        """Do what comes next behind all that the caller has asked its device for."""

    def lead(self) -> None:
        """Let what the caller asks its device for next come behind all that was asked for here."""

    def push(self, tensor: Tensor, rank: int, offset: int) -> None:
        """Copy a contiguous tensor into the arena of a rank."""

    def pull(self, offset: int, tensor: Tensor) -> None:
        """Copy from the own arena into a contiguous tensor."""

    def signal(self, members: int, offset: int, epoch: int) -> None:
        """Set a flag in the arena of each rank that has a bit in `members`."""

    def wait(self, offset: int, epoch: int, source: int) -> None:
        """Go on once a flag of the own arena, which `source` sets, is at least `epoch`, or patience ends."""

    def drain(self) -> None:
        """Return once all is done that was asked for here, and that the caller asked its device for."""

    def close(self) -> None:
        """Drain it for the last time."""

    def aside(self) -> AbstractContextManager[object]:
        """Where the calling thread's own work for the device is behind nothing but what it asks for there."""


LaneMaker = Callable[[Arena, Plane], Lane]


class ThreadLane:
    """Implements Lane for memory of the host, by a thread. The caller's own work is done when it calls."""

    def __init__(self, arena: Arena, plane: Plane) -> None:
        self._arena, self._patience = arena, arena.patience(plane)
        self._thread = ThreadPoolExecutor(1, "fabric-lane")
        self._last: Future[None] | None = None

    def follow(self) -> None:
        """See Lane."""

    def lead(self) -> None:
        """See Lane."""
        if self._last is not None:
            self._last.result()

    def push(self, tensor: Tensor, rank: int, offset: int) -> None:
        """See Lane."""
        address = self._arena.host_addresses[rank] + offset
        self._do(lambda: memmove(address, tensor.data_ptr(), tensor.nbytes))

    def pull(self, offset: int, tensor: Tensor) -> None:
        """See Lane."""
        address = self._arena.memory.data_ptr() + offset
        self._do(lambda: memmove(tensor.data_ptr(), address, tensor.nbytes))

    def signal(self, members: int, offset: int, epoch: int) -> None:
        """See Lane."""
        told = [address for rank, address in enumerate(self._arena.host_addresses) if members >> rank & 1]
        value = torch.tensor([epoch])

        def tell() -> None:
            if self._patience.stop < epoch:
                for address in told:
                    memmove(address + offset, value.data_ptr(), value.nbytes)

        self._do(tell)

    def wait(self, offset: int, epoch: int, source: int) -> None:
        """See Lane."""
        flag = self._arena.view(offset, 1, dtype=torch.int64)
        self._do(lambda: self._wait(flag, epoch, source))

    def drain(self) -> None:
        """See Lane."""
        self.lead()

    def close(self) -> None:
        """See Lane."""
        self._thread.shutdown()

    def aside(self) -> AbstractContextManager[object]:
        """See Lane."""
        return nullcontext()

    def _do(self, work: Callable[[], object]) -> None:
        before = self._last

        def carry_out() -> None:
            if before is not None:
                before.result()  # whatever failed before fails this, too
            work()

        self._last = self._thread.submit(carry_out)

    def _wait(self, flag: Tensor, epoch: int, source: int) -> None:
        """`loong.kernels.signals.wait`, for a thread."""
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
