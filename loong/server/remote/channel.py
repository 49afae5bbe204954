"""Frames between two processes, over the ends of a pair of sockets that nobody else can open."""

import asyncio
from collections.abc import Callable
from socket import socket
from typing import cast

_LENGTH_BYTES = 4


class RemoteChannel(asyncio.Protocol):
    """One end. `take` is called with each frame, `end` once: when the other end is closed, however it was."""

    def __init__(self, take: Callable[[bytes], None], end: Callable[[], None]) -> None:
        self._take, self._end = take, end
        self._received = bytearray()

    async def open(self, end: socket) -> None:
        """Begin to receive, on a connected Unix socket that is the channel's from now on."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    @property
    def num_unsent_bytes(self) -> int:
        """What the other end has not taken in yet, beyond what the system keeps."""
        return self._transport.get_write_buffer_size()

    def send(self, frame: bytes) -> None:
        """Queue one frame; it leaves in order, or never if the other end is closed."""
        self._transport.writelines((len(frame).to_bytes(_LENGTH_BYTES, "little"), frame))

    def close(self) -> None:
        """Let what is queued leave, then close."""
        self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what to write to."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not, by name

    def data_received(self, data: bytes) -> None:
        """Hand on the frames that are whole."""
        received = self._received
        received += data
        start = 0
        while len(received) >= (body := start + _LENGTH_BYTES):
            stop = body + int.from_bytes(received[start:body], "little")
            if stop > len(received):
                break
            self._take(bytes(received[body:stop]))
            start = stop
        del received[:start]

    def connection_lost(self, _error: Exception | None) -> None:
        """Tell that it is over."""
        self._end()
