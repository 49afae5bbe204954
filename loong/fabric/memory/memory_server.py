"""A server that gives a file descriptor of this process's memory to each process that connects."""

import socket
import struct
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from loong.core.errors import ClusterError
from loong.fabric.messages.handshake import Handshake
from loong.fabric.messages.peer_registry import listen
from loong.fabric.messages.welcoming import Welcoming

_NUM_BYTES = struct.Struct("<Q")
_RETRY_SECONDS = 0.005
_SECONDS = 5.0  # for a client to take it


class MemoryServer:
    """Gives `descriptor`, of memory of `num_bytes`, to every process that connects at `path`."""

    def __init__(self, path: Path, descriptor: int, num_bytes: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._size = _NUM_BYTES.pack(num_bytes)
        self._welcoming = Welcoming(listen(path), _SECONDS, self._give)

    def close(self) -> None:
        """Stop the server."""
        self._welcoming.close()
        self._path.unlink(missing_ok=True)

    def _give(self, handshake: Handshake) -> bool:
        socket.send_fds(handshake.connection, [self._size], [self._descriptor])
        return False


def fetch_memory(path: Path, num_bytes: int, deadline: float) -> int:
    """Return the descriptor from the memory server at `path`, once the server runs.

    Raises ClusterError after `deadline` seconds, or if the memory does not have `num_bytes`.
    """
    end = monotonic() + deadline
    while (left := end - monotonic()) > 0:
        with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):  # it does not listen yet
            connection.settimeout(left)
            connection.connect(str(path))
            size, descriptors, _, _ = socket.recv_fds(connection, _NUM_BYTES.size, 1)
            if len(size) == _NUM_BYTES.size and descriptors:
                if (given := _NUM_BYTES.unpack(size)[0]) != num_bytes:
                    raise ClusterError(f"{path} gave memory of {given} bytes where {num_bytes} were expected")
                return descriptors[0]
        sleep(_RETRY_SECONDS)
    raise ClusterError(f"no process offered memory at {path} within {deadline:g} s")
