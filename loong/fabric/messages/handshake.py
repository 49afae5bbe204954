"""The first bytes of a connection, which must all arrive before one deadline."""

import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from time import monotonic, sleep
from typing import TypeVar

A = TypeVar("A")
T = TypeVar("T")

TOO_MANY_CALLERS = (ConnectionError, BlockingIOError)  # dropped, or no room to wait at a Unix socket
_RETRY_SECONDS = 0.05
_LEAST_SECONDS = 0.001  # so that a process that was paused receives what has come


class EarlyEndError(ConnectionAbortedError):
    """A connection ended, or was dropped, before all bytes had come that were expected."""

    def __init__(self, received: bytes, *, is_dropped: bool) -> None:
        super().__init__(f"it {'was dropped' if is_dropped else 'ended'} after {received!r}")
        self.received = received


class Handshake:
    """Sends and receives the first bytes of `connection` within `seconds`, however slowly they come.

    A listener may drop the connection until the caller has proved who it is. All methods raise OSError when
    the other end leaves, and TimeoutError after the deadline.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        self._seconds = seconds
        self._end = monotonic() + seconds
        self._lock = Lock()
        self._is_proved = self._is_dropped = False

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self._within_deadline(self.connection.sendall, data)

    def receive(self, num_bytes: int) -> bytes:
        """Return the next `num_bytes`. Raises EarlyEndError if the other end closes before."""
        received = bytearray()
        while len(received) < num_bytes:
            part = self._within_deadline(self.connection.recv, num_bytes - len(received))
            if not part:
                raise EarlyEndError(bytes(received), is_dropped=self._is_dropped)
            received += part
        return bytes(received)

    def prove(self) -> None:
        """Keep the connection from being dropped. Raises ConnectionAbortedError if it was dropped before."""
        with self._lock:
            if self._is_dropped:
                raise ConnectionAbortedError("it was dropped at its last byte")
            self._is_proved = True

    def drop(self) -> None:
        """Cut the connection, unless the caller has proved who it is. Any thread may call it."""
        with self._lock:
            if not self._is_proved and not self._is_dropped:
                self._is_dropped = True
                with suppress(OSError):  # the other end may have closed first
                    self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._is_dropped = True
            self.connection.close()

    @property
    def is_pending(self) -> bool:
        """Return whether the caller has yet to prove who it is."""
        return not self._is_proved and not self._is_dropped

    def _within_deadline(self, call: Callable[[A], T], argument: A) -> T:
        self.connection.settimeout(max(self._end - monotonic(), _LEAST_SECONDS))
        try:
            return call(argument)
        except TimeoutError:
            raise TimeoutError(f"its handshake took longer than {self._seconds:g} s") from None


def again(
    attempt: Callable[[], T], seconds: float, retried: tuple[type[OSError], ...] = TOO_MANY_CALLERS
) -> T:
    """Return the result of `attempt`, made again for `seconds` while it raises one of `retried`.

    The exception is ConnectionRefusedError: nothing listens there.
    """
    end = monotonic() + seconds
    while True:
        try:
            return attempt()
        except ConnectionRefusedError:
            raise
        except retried:
            if monotonic() > end:
                raise
        sleep(_RETRY_SECONDS)
