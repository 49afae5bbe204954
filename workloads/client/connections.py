"""Connections to one server that are reused, a request at a time, without a task for each."""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from loong.workloads.client.http_response import HTTPFormatError, ResponseParser

Receive = Callable[[bytes], bool]
"""Receives a part of a body; returns whether the rest is not needed."""

MAX_TEXT_BYTES = 10_000  # of a refusal


class StaleConnectionError(ConnectionError):
    """A reused connection was closed before any byte of a response arrived."""


class _Connection(asyncio.Protocol):
    """One connection; `post` may be called again once it has returned and `is_reusable`."""

    def __init__(self) -> None:
        self.is_reusable = False
        self._num_posted = 0
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser()
        self._receive: Receive | None = None
        self._refusal = b""
        self._done: asyncio.Future[int] | None = None

    async def post(self, request: bytes, receive: Receive) -> tuple[int, str]:
        """Send a request and follow its response; return its status, and its text if that is not 200."""
        assert self._transport is not None
        self._parser, self._receive, self._refusal = ResponseParser(), receive, b""
        self.is_reusable = False
        self._num_posted += 1
        self._done = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            return await self._done, self._refusal.decode(errors="replace")
        finally:
            self._done = None
            if not self.is_reusable:
                self._transport.abort()

    def close(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but its class

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self._done is None or self._done.done():
            self.is_reusable = False  # no request is open
            return
        try:
            body = self._parser.feed(data)
            is_enough = self._take(body)
        except Exception as error:  # noqa: BLE001  the caller that awaits the answer gets it
            self._done.set_exception(error)
            return
        if self._parser.is_complete or is_enough:
            self.is_reusable = self._parser.is_complete and self._parser.keeps_alive
            self._done.set_result(self._parser.status)

    def _take(self, body: bytes) -> bool:
        if not body:
            return False
        if self._parser.status == 200:
            assert self._receive is not None
            return self._receive(body)
        self._refusal += body[:MAX_TEXT_BYTES]
        return len(self._refusal) >= MAX_TEXT_BYTES

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_reusable = False
        if self._done is None or self._done.done():
            return
        if self._num_posted > 1 and not self._parser.status:
            self._done.set_exception(StaleConnectionError("a kept connection was closed"))
        elif exc is not None:
            self._done.set_exception(exc)
        else:
            try:
                self._parser.end()
            except HTTPFormatError as error:
                self._done.set_exception(error)
            else:
                self._done.set_result(self._parser.status)


class ConnectionPool:
    """Connections to the server at a URL, one for each concurrent request."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._idle: deque[_Connection] = deque()
        lines = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    def request(self, path: str, body: bytes) -> bytes:
        """Return the bytes of a POST."""
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    async def post(self, request: bytes, receive: Receive) -> tuple[int, str]:
        """Send a request, on a new connection if a kept one turns out to be closed.

        Raises:
            OSError, HTTPFormatError: nothing answers, or the answer is not HTTP.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                try:
                    return await self._post(connection, request, receive)
                except StaleConnectionError:
                    continue
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        return await self._post(connection, request, receive)

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _post(self, connection: _Connection, request: bytes, receive: Receive) -> tuple[int, str]:
        answer = await connection.post(request, receive)
        if connection.is_reusable:
            self._idle.append(connection)
        return answer
