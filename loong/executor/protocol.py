"""What carries plans out: real workers, or virtual time."""

from collections.abc import Iterable
from typing import Protocol

from loong.core.events import Drained, Event
from loong.core.instructions import Instruction


class Executor(Protocol):
    """Takes instructions, tells events. The order of events is the order in which they happened.

    After the last `TokensProduced` of a batch there is one `BatchFinished`; each `MoveKV` ends in one
    `MigrationFinished`. Arrivals and aborts come through the same stream.
    """

    async def next_event(self) -> Event | Drained:
        """Wait for what happens next."""
        ...

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Start carrying these out, in this order on each instance; returns at once."""
        ...
