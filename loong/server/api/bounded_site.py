"""A site that accepts as many connections as there are descriptors, and refuses others with an error."""

import asyncio
import socket
from typing import cast

import msgspec
from aiohttp import web

from loong.server.api.errors import ApiError
from loong.server.api.request_ids import HEADER, new_id

MAX_REFUSED = 64  # refused connections that get an answer at a time; others are closed at once
REFUSAL_SECONDS = 2.0  # for a client to read the answer


class BoundedSite(web.SockSite):
    """A site with at most `max_connections` connections at a time.

    It needs uvloop: asyncio's own loop accepts all waiting connections before any of them counts.
    """

    def __init__(
        self,
        runner: web.BaseRunner,
        listener: socket.socket,
        *,
        backlog: int,
        max_connections: int,
        retry_after: int,
    ) -> None:
        super().__init__(runner, listener, backlog=backlog)
        self._listener, self._max_connections = listener, max_connections
        self._refused: set[_Refusal] = set()
        why = f"{max_connections} connections are open, and no more may be"
        self._error, self._retry_after = ApiError(503, why, "too_many_connections"), retry_after

    async def start(self) -> None:
        """Start to listen."""
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, sock=self._listener, backlog=self._backlog)

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None  # set as long as the runner has sites
        if len(server.connections) < self._max_connections:
            return server()
        return _Refusal(_answer(self._error, self._retry_after), self._refused)


class _Refusal(asyncio.Protocol):
    """Answers any request with the error that there are too many connections."""

    def __init__(self, answer: bytes, refused: "set[_Refusal]") -> None:
        self._answer, self._refused = answer, refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Write the answer and wait: closing while a request arrives would discard the answer."""
        writing = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it
        if len(self._refused) >= MAX_REFUSED:
            writing.abort()
            return
        self._refused.add(self)
        writing.write(self._answer)
        writing.write_eof()
        self._end = asyncio.get_running_loop().call_later(REFUSAL_SECONDS, writing.abort)

    def connection_lost(self, _error: Exception | None) -> None:
        """Forget the client, which has left or had the time to read."""
        if self in self._refused:
            self._refused.remove(self)
            self._end.cancel()


def _answer(error: ApiError, retry_after: int) -> bytes:
    body = msgspec.json.encode(error.body)
    head = (
        f"HTTP/1.1 {error.status} Service Unavailable",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        f"Retry-After: {retry_after}",
        f"{HEADER}: {new_id()}",
        "Connection: close",
    )
    return "\r\n".join((*head, "", "")).encode() + body
