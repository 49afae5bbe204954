"""A bound on the work that a host has queued on a stream of a GPU.

A driver queues about 1,024 entries of a stream. A thread that launches more waits inside the driver, where it
blocks all threads of its process that launch anything, on any stream. If the stream waits for another
process, and that one for something that another thread here is about to launch, both stand still. So threads
wait outside of the driver, before a queue is full. Meanwhile they can do something else.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep

import torch

_LOOK_SECONDS = 100e-6  # between checks whether there is room


class LaunchQueue:
    """Launches of one thread on `stream()`: at most `most`, and one call's, are ahead of the device.

    An event follows at least `marked` launches.
    """

    def __init__(self, stream: Callable[[], torch.cuda.Stream], most: int = 768, marked: int = 32) -> None:
        self._stream, self._most, self._marked = stream, most, marked
        self._marks = deque[tuple[torch.cuda.Event, int]]()  # each with the launches since the one before
        self._num_unmarked = self._num_marked = 0
        self._meanwhile: Callable[[], None] = _nothing

    @contextmanager
    def calling(self, meanwhile: Callable[[], None]) -> Iterator[None]:
        """Return a context in which `meanwhile` is called now and then during launches and waits."""
        self._meanwhile = meanwhile
        try:
            yield
        finally:
            self._meanwhile = _nothing

    def add(self, num_launches: int) -> None:
        """Count launches, and return once there is room for more."""
        self._num_unmarked += num_launches
        if self._num_unmarked < self._marked:
            return
        self._marks.append((self._stream().record_event(), self._num_unmarked))
        self._num_marked += self._num_unmarked
        self._num_unmarked = 0
        self._meanwhile()
        while self._num_marked > self._most and len(self._marks) > 1:
            event, num_launches = self._marks[0]
            while not event.query():  # type: ignore[no-untyped-call]  # torch's own
                sleep(_LOOK_SECONDS)
                self._meanwhile()
            self._marks.popleft()
            self._num_marked -= num_launches


def _nothing() -> None:
    """Do nothing."""
