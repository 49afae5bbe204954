"""Threads that take the new connections of a listening socket."""

import socket
from collections.abc import Callable
from threading import Thread


class Welcoming:
    """Calls `greet` with each connection of `listener`, on `num_threads` threads, until it is closed.

    `greet` keeps or closes the connection.
    """

    def __init__(
        self, listener: socket.socket, greet: Callable[[socket.socket], None], num_threads: int = 1
    ) -> None:
        self._listener, self._greet = listener, greet
        self._threads = [
            Thread(target=self._accept, name="fabric-welcome", daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop listening, and wait for the threads to end."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was shut down
                return
            self._greet(connection)
