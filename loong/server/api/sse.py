"""Server-sent events with keep-alive comments, and few writes.

A write is expensive, since it may wake a client for a few bytes. So the events of all streams in one turn of
the event loop are collected, and written together in the next turn.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from aiohttp import HttpVersion11, web

from loong.server.api.errors import ApiError, as_api_error
from loong.server.settings import ServerSettings

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy that collects events would undo streaming
}
_KEEP_ALIVE = b": keep-alive\n\n"
_MAX_STREAMS = 64  # written together
_MAX_COLLECTED_BYTES = 2**14  # a stream with more in one turn waits for the others


def event_of(content: object) -> bytes:
    """Return the event of a JSON value."""
    return b"data: %b\n\n" % msgspec.json.encode(content)


def _error_event(error: ApiError) -> bytes:
    return event_of(error.body)


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """The parts of a stream besides its events: the last event, keep-alive comments, and errors."""

    last_event: bytes
    has_keep_alives: bool
    error_event: Callable[[ApiError], bytes] = _error_event


OPENAI_STREAM = StreamFormat(b"data: [DONE]\n\n", has_keep_alives=True)
BARE_STREAM = StreamFormat(b"", has_keep_alives=False)


class ClientLeftError(ConnectionError):
    """The client no longer reads the stream."""


class EventWrites:
    """The streams of one server that write in the next turn of the event loop."""

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: "EventStream") -> None:
        """Let a stream write in the next turn, or at once if many streams wait already."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._write)
        self._streams.append(stream)
        if len(self._streams) >= _MAX_STREAMS:
            self._write()

    def _write(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.write()


EVENT_WRITES = web.AppKey("event_writes", EventWrites)


class EventStream:
    """An answer that consists of events."""

    def __init__(self, settings: ServerSettings, form: StreamFormat = OPENAI_STREAM) -> None:
        self._format = form
        self.response = web.StreamResponse(headers=_HEADERS)
        self._settings = settings
        self._collected = bytearray()

    @asynccontextmanager
    async def open(self, http: web.Request) -> AsyncIterator[None]:
        """Send the headers, comments in long pauses, and the last event at the end.

        An error inside the context is sent as an event before the last one. The context ends without an error
        if the client leaves.
        """
        self._http, self._writes = http, http.app[EVENT_WRITES]
        self._is_chunked = http.version >= HttpVersion11
        self._loop = asyncio.get_running_loop()
        await self.response.prepare(http)
        self._last_write = self._loop.time()
        self._keep_alive()
        try:
            try:
                yield
            except ClientLeftError:
                raise
            except Exception as error:  # noqa: BLE001  the answer is under way: there can be no other
                self._collected += self._format.error_event(as_api_error(error))
            self._next_keep_alive.cancel()
            rest = bytes(self._collected) + self._format.last_event
            self._collected.clear()
            await self._in_time(self.response.write_eof(rest))
        except ClientLeftError:
            if http.transport is not None:
                http.transport.abort()
        finally:
            self._next_keep_alive.cancel()
            self._collected.clear()

    async def send(self, event: bytes) -> None:
        """Send events. Wait while the client is slow, for a bounded time (`ClientLeftError`)."""
        self._collect(event)
        if len(self._collected) > _MAX_COLLECTED_BYTES:
            self.write()
            await asyncio.sleep(0)
        if self._http.protocol.writing_paused:
            await self._in_time(self._http.writer.drain())

    def write(self) -> None:
        """Write the collected events."""
        transport = self._http.transport
        if transport is not None and self._collected:
            # Not by `response.write`, which costs as much as all other work for a token.
            data = bytes(self._collected)
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
            self._last_write = self._loop.time()
        self._collected.clear()

    def _collect(self, data: bytes) -> None:
        is_first = not self._collected
        self._collected += data
        if is_first:
            self._writes.add(self)

    async def _in_time(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._settings.write_timeout):
                await writing
        except (TimeoutError, ConnectionError) as error:
            raise ClientLeftError from error

    def _keep_alive(self) -> None:
        """Send a comment after a long pause, and schedule the next check."""
        interval = self._settings.keep_alive_interval
        idle = self._loop.time() - self._last_write
        is_due = idle >= interval and self._format.has_keep_alives
        if is_due and not self._http.protocol.writing_paused:
            self._collect(_KEEP_ALIVE)
            self.write()
        self._next_keep_alive = self._loop.call_later(
            interval - idle if idle < interval else interval, self._keep_alive
        )
