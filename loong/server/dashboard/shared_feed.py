"""The feed of all open pages: each tick is made and encoded once, whatever the number of pages."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress

from loong.server.api.errors import ApiError
from loong.server.api.sse import event_of
from loong.server.dashboard.feed import Feed

TICK_SECONDS = 0.5
MAX_PAGES = 256
MAX_LATE_TICKS = 20  # that a slow page may be behind; then its stream ends, and the page opens another


class SharedFeed:
    """Gives each page the past when it opens, and all later ticks. The page that wakes first makes a tick."""

    def __init__(self, new_feed: Callable[[], Feed]) -> None:
        self._new_feed = new_feed
        self._feed: Feed | None = None  # None: no page has had a tick
        self._ticks = deque[bytes](maxlen=MAX_LATE_TICKS)
        self._num_ticks = 0
        self._first, self._first_number = b"", 0  # a tick with the past, for pages that wait for their first
        self._num_pages = self._num_new = 0  # open pages, and those of them without a tick
        self._due = 0.0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the feeds of all pages."""
        self._stopping.set()

    @contextmanager
    def page(self) -> Iterator[None]:
        """Count an open page. Raises a 503 if there are too many."""
        if self._num_pages >= MAX_PAGES:
            message = f"{MAX_PAGES} pages show this dashboard, and no more may"
            raise ApiError(503, message, "too_many_pages")
        self._num_pages += 1
        try:
            yield
        finally:
            self._num_pages -= 1
            if self._num_pages == 0:
                self._feed = None
                self._ticks.clear()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of a page, until the server stops or the page is too far behind."""
        yield event_of(self._new_feed().hello())
        number, first = await self._first_tick()
        yield first
        while await self._next_tick():
            num_late, number = self._num_ticks - number, self._num_ticks
            if num_late > len(self._ticks):
                return
            for tick in list(self._ticks)[-num_late:]:
                yield tick

    async def _first_tick(self) -> tuple[int, bytes]:
        arrived = self._num_ticks
        self._num_new += 1
        try:
            while self._first_number <= arrived and await self._next_tick():
                pass
            return self._first_number, self._first
        finally:
            self._num_new -= 1

    async def _next_tick(self) -> bool:
        """Wait for the next tick, and make it if no other page has. Return False if the server stops."""
        number, loop = self._num_ticks, asyncio.get_running_loop()
        while self._num_ticks == number and not self._stopping.is_set():
            if (left := self._due - loop.time()) <= 0:
                self._make(loop.time())
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), left)
        return not self._stopping.is_set()

    def _make(self, now: float) -> None:
        self._due = now + TICK_SECONDS
        tick = b"" if self._feed is None else event_of(self._feed.tick())
        if self._num_new:
            self._feed = self._new_feed()
            self._first, self._first_number = event_of(self._feed.tick()), self._num_ticks + 1
        else:
            self._first = b""
        self._ticks.append(tick)
        self._num_ticks += 1
