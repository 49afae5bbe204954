"""The protocol of executors: real workers, or virtual time."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from loong.core.events import Event
from loong.core.instructions import Instruction


class Executor(Protocol):
    """Takes instructions and returns events, in the order in which they happened.

    Of each batch there is one `BatchStarted`, then its `TokensProduced`, then one `BatchFinished`. Each
    `MoveKV` ends in one `MigrationFinished`. Arrivals and aborts come through the same stream.
    """

    async def next_events(self) -> Sequence[Event]:
        """Wait for the next events, and return all so far; empty if there will be no more."""
        ...

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Start carrying out instructions, in this order on each instance; return at once."""
        ...
