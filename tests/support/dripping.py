"""Strangers that connect by the hundred and send a byte now and then."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread

_SECONDS_BETWEEN_BYTES = 0.25


@dataclass(frozen=True, slots=True)
class Drippers:
    """Connections on each of which a byte is sent now and then, oldest first."""

    connections: list[socket.socket]

    def are_open(self) -> list[bool]:
        """Return which of them the other end has not closed."""
        return [_is_open(connection) for connection in self.connections]


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def tcp(endpoint: str) -> Callable[[], socket.socket]:
    """Return a function that connects to "address:port", also of ZeroMQ."""
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return lambda: socket.create_connection((address, int(port)), timeout=30)


@contextmanager
def dripping(connect: Callable[[], socket.socket], number: int, data: bytes) -> Iterator[Drippers]:
    """Connect `number` times, and send `data` byte by byte on each connection, again and again."""
    with ExitStack() as stack:
        drippers = Drippers([stack.enter_context(connect()) for _ in range(number)])
        for connection in drippers.connections:
            connection.setblocking(False)
        is_over = Event()
        thread = Thread(target=_drip, args=(drippers, data, is_over))
        thread.start()
        try:
            yield drippers
        finally:
            is_over.set()
            thread.join()


def _drip(drippers: Drippers, data: bytes, is_over: Event) -> None:
    position = 0
    while not is_over.wait(_SECONDS_BETWEEN_BYTES):
        byte = data[position % len(data) : position % len(data) + 1]
        for connection in drippers.connections:
            with suppress(OSError):  # it was dropped
                connection.send(byte)
        position += 1
