"""Threads that take the new connections of a listening socket."""

import socket
from collections.abc import Callable
from threading import Event, Thread

from loong.fabric.messages.handshake import Handshake

MAX_PENDING = 128  # connections whose callers have yet to prove who they are
_RETRY_SECONDS = 0.05


class Welcoming:
    """Calls `greet` with each connection of `listener`, on a thread of its own, until it is closed.

    The handshake must end within `seconds`. `greet` calls `Handshake.prove` once it knows the caller, and
    returns whether it keeps the connection. Beyond `MAX_PENDING` unknown callers the oldest is dropped.
    """

    def __init__(self, listener: socket.socket, seconds: float, greet: Callable[[Handshake], bool]) -> None:
        self._listener, self._seconds, self._greet = listener, seconds, greet
        self._threads: dict[Handshake, Thread] = {}  # oldest first
        self._is_closing = Event()
        self._thread = Thread(target=self._accept, name="fabric-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, drop unknown callers, and wait for the threads to end."""
        self._is_closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for handshake, thread in list(self._threads.items()):
            handshake.drop()
            thread.join()

    def _accept(self) -> None:
        while not self._is_closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closing, or the caller has left, or no descriptor is free
                self._drop_all_but(MAX_PENDING // 2)
                self._is_closing.wait(_RETRY_SECONDS)
                continue
            self._drop_all_but(MAX_PENDING - 1)
            self._start(Handshake(connection, self._seconds))

    def _drop_all_but(self, number: int) -> None:
        pending = [handshake for handshake in list(self._threads) if handshake.is_pending]
        for handshake in pending[: max(0, len(pending) - number)]:
            handshake.drop()

    def _start(self, handshake: Handshake) -> None:
        thread = Thread(target=self._run, args=(handshake,), name="fabric-welcome", daemon=True)
        self._threads[handshake] = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left; the caller tries again
            del self._threads[handshake]
            handshake.close()

    def _run(self, handshake: Handshake) -> None:
        is_kept = False
        try:
            is_kept = self._greet(handshake)
        except OSError:  # the caller has left, is too slow, or was dropped
            pass
        finally:
            if not is_kept:
                handshake.close()
            del self._threads[handshake]
