"""A server that gives a file descriptor of this process's memory to each process that connects."""

import socket
import struct
from pathlib import Path
from threading import Thread
from time import monotonic, sleep

from loong.core.errors import ClusterError
from loong.fabric.messages.peer_registry import listen

_NUM_BYTES = struct.Struct("<Q")
_RETRY_SECONDS = 0.005


class MemoryServer:
    """Gives `descriptor`, of memory of `num_bytes`, to every process that connects at `path`."""

    def __init__(self, path: Path, descriptor: int, num_bytes: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._size = _NUM_BYTES.pack(num_bytes)
        self._listener = listen(path)
        self._thread = Thread(target=self._serve, name="fabric-memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was shut down
                return
            with connection:
                try:
                    socket.send_fds(connection, [self._size], [self._descriptor])
                except OSError:  # the client has left
                    continue


def fetch_memory(path: Path, num_bytes: int, deadline: float) -> int:
    """Return the descriptor from the memory server at `path`, once the server runs.

    Raises ClusterError after `deadline` seconds, or if the memory does not have `num_bytes`.
    """
    end = monotonic() + deadline
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(deadline)
            try:
                connection.connect(str(path))
                size, descriptors, _, _ = socket.recv_fds(connection, _NUM_BYTES.size, 1)
            except OSError as error:
                if monotonic() > end:
                    raise ClusterError(
                        f"no process offered memory at {path} within {deadline:g} s"
                    ) from error
                sleep(_RETRY_SECONDS)
                continue
        if len(size) == _NUM_BYTES.size and descriptors:
            if (given := _NUM_BYTES.unpack(size)[0]) != num_bytes:
                raise ClusterError(f"{path} gave memory of {given} bytes where {num_bytes} were expected")
            return descriptors[0]
        sleep(_RETRY_SECONDS)
