"""Server-sent events that are never silent for long."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from loong.server.settings import ServerSettings

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # a proxy that collects events would undo streaming
}
_KEEP_ALIVE = b": keep-alive\n\n"


class ClientLeftError(ConnectionError):
    """Nobody reads the stream any more."""


class EventStream:
    """An answer of events, one JSON object each."""

    def __init__(self, settings: ServerSettings) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        self._settings = settings
        self._last_write = 0.0

    @asynccontextmanager
    async def open(self, http: web.Request) -> AsyncIterator[None]:
        """Send the headers, then comments whenever nothing else was sent for a while; `[DONE]` at the end.

        A client that leaves ends the context quietly.
        """
        await self.response.prepare(http)
        self._last_write = asyncio.get_running_loop().time()
        keeping_alive = asyncio.create_task(self._keep_alive())
        try:
            yield
            await self._write(b"data: [DONE]\n\n")
        except ClientLeftError:
            if http.transport is not None:
                http.transport.abort()
        finally:
            keeping_alive.cancel()
            await asyncio.gather(keeping_alive, return_exceptions=True)

    async def send(self, event: object) -> None:
        """Send one event; wait while the client is slow to read, but not for ever (`ClientLeftError`)."""
        await self._write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._settings.write_timeout):
                await self.response.write(data)
        except (TimeoutError, ConnectionError) as error:
            raise ClientLeftError from error
        self._last_write = asyncio.get_running_loop().time()

    async def _keep_alive(self) -> None:
        now = asyncio.get_running_loop().time
        interval = self._settings.keep_alive_interval
        while True:
            await asyncio.sleep(self._last_write + interval - now())
            if now() - self._last_write >= interval:
                await self._write(_KEEP_ALIVE)
