"""HTTP written by hand, as no well-behaved client would."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

COMPLETIONS = "/v1/completions"
JSON_HEADER = "Content-Type: application/json"


@dataclass(frozen=True)
class RawConnection:
    """Both ends of one socket."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """Write, and wait until the kernel has it."""
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> int:
        """Return the status of the next answer."""
        return int((await self.reader.readline()).split()[1])

    async def is_closed(self) -> bool:
        """Wait until the server closes; whether that was without a word."""
        try:
            return await self.reader.read() == b""
        except ConnectionError:
            return True


@asynccontextmanager
async def raw_connection(url: str, *, limit: int = 2**16) -> AsyncIterator[RawConnection]:
    """Yield a connection that reads at most about `limit` bytes ahead, and is dropped at the end."""
    host, port = url.removeprefix("http://").split(":")
    connection = RawConnection(*await asyncio.open_connection(host, int(port), limit=limit))
    try:
        yield connection
    finally:
        connection.writer.transport.abort()


def request_head(path: str, *headers: str) -> bytes:
    """Return the head of a POST of JSON."""
    return "\r\n".join((f"POST {path} HTTP/1.1", "Host: localhost", JSON_HEADER, *headers, "", "")).encode()


def completion_request(**fields: object) -> bytes:
    """Return a whole request for a completion."""
    body = json.dumps(fields).encode()
    return request_head(COMPLETIONS, f"Content-Length: {len(body)}") + body


async def until(condition: Callable[[], bool]) -> None:
    """Let others run until a condition holds; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.01)
