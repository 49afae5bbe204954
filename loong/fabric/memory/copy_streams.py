"""What moves bytes between arenas and keeps their flags, in order, beside what the caller computes."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from loong.fabric.memory.arena import Arena
from loong.fabric.traffic import Plane


class CopyStream(Protocol):
    """Does what it is asked for in the order of the calls, which return at once while its queue has room.

    Ranks are those of the arena, offsets are bytes in one. Flags and epochs are those of
    `loong.kernels.exchange.signals`.
    """

    def follow(self) -> None:
        """Do what comes next behind all that the caller has asked its device for."""

    def mark(self) -> Callable[[], None]:
        """Something that lets what its caller asks the device for next come behind all that came here."""

    def push(self, tensor: Tensor, rank: int, offset: int) -> None:
        """Copy a contiguous tensor into the arena of a rank."""

    def pull(self, offset: int, tensor: Tensor) -> None:
        """Copy from the own arena into a contiguous tensor."""

    def signal(self, members: int, offset: int, epoch: int) -> None:
        """Set a flag in the arena of each rank that has a bit in `members`."""

    def wait(self, offset: int, epoch: int, source: int) -> None:
        """Go on once a flag of the own arena, which `source` sets, is at least `epoch`, or its
        deadline passes.
        """

    def drain(self) -> None:
        """Return once all is done that was asked for here, and that the caller asked its device for."""

    def close(self) -> None:
        """Drain it for the last time."""

    def aside(self) -> AbstractContextManager[object]:
        """Where the calling thread's own work for the device is behind nothing but what it asks for there."""


CopyStreamMaker = Callable[[Arena, Plane], CopyStream]
