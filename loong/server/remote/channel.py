"""Frames between two processes over a private pair of sockets."""

import asyncio
from collections.abc import Callable
from socket import socket
from typing import cast

_LENGTH_BYTES = 4


class RemoteChannel(asyncio.Protocol):
    """One end of the channel. `take` gets each frame; `end` is called once, when the other end has closed."""

    def __init__(self, take: Callable[[bytes], None], end: Callable[[], None]) -> None:
        self._take, self._end = take, end
        self._received = bytearray()

    async def open(self, end: socket) -> None:
        """Start to receive on a connected Unix socket, which now belongs to the channel."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    @property
    def num_unsent_bytes(self) -> int:
        """The number of bytes in the process's buffer that the other end has not yet read."""
        return self._transport.get_write_buffer_size()

    def send(self, frame: bytes) -> None:
        """Queue one frame. Frames are sent in order, or never after the other end has closed."""
        self._transport.writelines((len(frame).to_bytes(_LENGTH_BYTES, "little"), frame))

    def close(self) -> None:
        """Send the queued frames, then close."""
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        """Pass on all complete frames."""
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
        """Call `end`."""
        self._end()
