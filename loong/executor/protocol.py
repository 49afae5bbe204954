"""What carries plans out: real workers, or virtual time."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from loong.core.events import Event
from loong.core.instructions import Instruction


class Executor(Protocol):
    """Takes instructions, tells events. The order of events is the order in which they happened.

    Of each batch there is one `BatchStarted`, then its `TokensProduced`, then one `BatchFinished`. Each
    `MoveKV` ends in one `MigrationFinished`. Arrivals and aborts come through the same stream.
    """

    async def next_events(self) -> Sequence[Event]:
        """Wait for what happens next: all that has by now, or nothing if there will be no more events."""
        ...

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Start carrying these out, in this order on each instance; returns at once."""
        ...
