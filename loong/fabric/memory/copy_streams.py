"""Copy streams: ordered copies between arenas and their flags, concurrent with the caller's device work."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from loong.fabric.lanes import Lane
from loong.fabric.memory.arena import Arena


class CopyStream(Protocol):
    """Carries out calls in their order. The calls return at once while its queue has room.

    Ranks are those of the arena, offsets are bytes in one. Flags and epochs are those of
    `loong.kernels.exchange.signals`.
    """

    def follow(self) -> None:
        """Make later calls wait for all device work that the caller has submitted."""

    def mark(self) -> Callable[[], None]:
        """Return a function that makes later device work of its caller wait for all calls so far."""

    def push(self, tensor: Tensor, rank: int, offset: int) -> None:
        """Copy a contiguous tensor into the arena of a rank."""

    def pull(self, offset: int, tensor: Tensor) -> None:
        """Copy from the own arena into a contiguous tensor."""

    def signal(self, members: int, offset: int, epoch: int) -> None:
        """Set a flag to `epoch` in the arena of each rank with a bit in `members`."""

    def wait(self, offset: int, epoch: int, source: int) -> None:
        """Wait until a flag of the own arena, which `source` sets, is at least `epoch`, or the deadline."""

    def drain(self) -> None:
        """Return when all calls, and all device work that the caller has submitted, are done."""

    def close(self) -> None:
        """Drain the stream, and end it."""

    def aside(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's device work waits only for work submitted inside it."""


CopyStreamMaker = Callable[[Arena, Lane], CopyStream]
