"""The events of workers, for one reader."""

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic

from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Drained,
    Event,
    InstanceLost,
    TokensProduced,
    joined,
)
from loong.messages.stream import Stream

MAX_TURN_SECONDS = 0.005  # of a reader, after which other tasks run

_OF_BATCHES = BatchStarted | TokensProduced | BatchEndPredicted | BatchFinished


class EventStream:
    """Events in the order in which they became known, up to the end or an error."""

    def __init__(self) -> None:
        self._items = Stream[Event | Drained | BaseException]()
        self._ending: Drained | BaseException | None = None  # the end after the last event
        self._turn_began_at = monotonic()

    def put(self, item: Event | Drained | BaseException) -> None:
        """Add an event, or what comes after the last."""
        self._items.put(item)

    async def take(self, add_more: Callable[[], None], seen: Callable[[Event], Event]) -> Sequence[Event]:
        """Wait for events, and return all so far, each as it is `seen`; none after the end.

        `add_more` puts what is known by then. Events of batches that a loss before them has made void are
        left out. Raises the error that was put, after the events before it.
        """
        events: list[Event] = []
        if self._ending is None:
            await self._let_others_run()
            add_more()
            void = set[int]()  # of losses in this list: their later events are void too
            for item in await self._items.get_all():
                if isinstance(item, Drained | BaseException):
                    self._ending = item
                    break
                if void and isinstance(item, _OF_BATCHES) and item.batch_id in void:
                    continue
                event = seen(item)
                if isinstance(event, InstanceLost):
                    void.update(event.void_batch_ids)
                events.append(event)
        if isinstance(self._ending, BaseException) and not events:
            raise self._ending
        return joined(events)

    async def _let_others_run(self) -> None:
        """Suspend if the last suspension was long ago: taking available events does not suspend."""
        if monotonic() - self._turn_began_at > MAX_TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn_began_at = monotonic()
