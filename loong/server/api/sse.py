"""Server-sent events that are never silent for long, written together where they come together.

To write is dear: it may wake a client, which then reads a few bytes and sleeps again. So what all streams
have to say at one turn of the event loop is collected, and written in one go at the next.
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
_MAX_STREAMS = 64  # that are written in one go
_MAX_COLLECTED_BYTES = 2**14  # a stream that has more to say at one turn lets others have theirs first


def event_of(content: object) -> bytes:
    """One event, of a JSON value."""
    return b"data: %b\n\n" % msgspec.json.encode(content)


def _error_event(error: ApiError) -> bytes:
    return event_of(error.body)


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """What a stream has besides its events: a last one, comments while there are none, and errors."""

    last_event: bytes
    has_keep_alives: bool
    error_event: Callable[[ApiError], bytes] = _error_event


OPENAI_STREAM = StreamFormat(b"data: [DONE]\n\n", has_keep_alives=True)
BARE_STREAM = StreamFormat(b"", has_keep_alives=False)


class ClientLeftError(ConnectionError):
    """Nobody reads the stream any more."""


class EventWrites:
    """The streams of one server that have something to write at the next turn of the event loop."""

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: "EventStream") -> None:
        """Let a stream write then, or now if many want to: the first need not wait for the last."""
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
    """An answer of events."""

    def __init__(self, settings: ServerSettings, form: StreamFormat = OPENAI_STREAM) -> None:
        self._format = form
        self.response = web.StreamResponse(headers=_HEADERS)
        self._settings = settings
        self._collected = bytearray()

    @asynccontextmanager
    async def open(self, http: web.Request) -> AsyncIterator[None]:
        """Send the headers, then comments whenever nothing else was sent for a while, and the last event.

        What fails within is told as an event before it. A client that leaves ends the context quietly.
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
        """Send what `event_of` made; wait while the client is slow, but not for ever (`ClientLeftError`)."""
        self._collect(event)
        if len(self._collected) > _MAX_COLLECTED_BYTES:
            self.write()
            await asyncio.sleep(0)
        if self._http.protocol.writing_paused:
            await self._in_time(self._http.writer.drain())

    def write(self) -> None:
        """Write what was collected."""
        transport = self._http.transport
        if transport is not None and self._collected:
            # Not by `response.write`, which costs as much as all else that is done for a token.
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
        """Say something if it is time, and come back when it may be again."""
        interval = self._settings.keep_alive_interval
        idle = self._loop.time() - self._last_write
        is_due = idle >= interval and self._format.has_keep_alives
        if is_due and not self._http.protocol.writing_paused:
            self._collect(_KEEP_ALIVE)
            self.write()
        self._next_keep_alive = self._loop.call_later(
            interval - idle if idle < interval else interval, self._keep_alive
        )
