"""The directory in which processes of several hosts find each other, also after a restart.

Each process listens, then registers, and receives the endpoints of those that registered before. It connects
to them. So each pair of processes connects exactly once.
"""

import struct
from functools import partial
from threading import Lock

from loong.fabric.messages.handshake import Handshake, again
from loong.fabric.messages.network import Network
from loong.fabric.messages.tcp import (
    HANDSHAKE_SECONDS,
    StrangerError,
    admit,
    connect_to,
    endpoint_of,
    listen_at,
)
from loong.fabric.messages.welcoming import Welcoming
from loong.messages.stray_frames import StrayFrames

_ENTRY = struct.Struct("<I64s")  # rank, "address:port"
_NUM_ENTRIES = struct.Struct("<I")


class PeerDirectory:
    """Listens at `address`, on a free port, for processes that know `secret`."""

    def __init__(self, address: str, secret: str) -> None:
        self._secret = secret
        self._lock = Lock()
        self._endpoints: dict[int, str] = {}
        self._strays = StrayFrames("the directory of peers")
        listener = listen_at(address)
        self.endpoint = endpoint_of(listener)
        self._welcoming = Welcoming(listener, HANDSHAKE_SECONDS, self._greet)

    def forget(self, rank: int) -> None:
        """Remove a process that has ended, so that no other tries to reach it."""
        with self._lock:
            self._endpoints.pop(rank, None)

    def close(self) -> None:
        """Stop listening."""
        self._welcoming.close()

    @property
    def num_strays(self) -> int:
        """Return the number of connections that were closed because they did not prove the secret."""
        return self._strays.num_dropped

    def _greet(self, handshake: Handshake) -> bool:
        try:
            admit(handshake, self._secret)
        except StrangerError as error:
            self._strays.drop("a connection without the secret", str(error))
            return False
        rank, name = _ENTRY.unpack(handshake.receive(_ENTRY.size))
        handshake.send(self._register(rank, name.rstrip(b"\0").decode("ascii", "replace")))
        return False

    def _register(self, rank: int, endpoint: str) -> bytes:
        """Take an entry, and return all earlier ones of other ranks."""
        with self._lock:
            self._endpoints.pop(rank, None)
            entries = [_ENTRY.pack(other, name.encode()) for other, name in self._endpoints.items()]
            self._endpoints[rank] = endpoint
        return _NUM_ENTRIES.pack(len(entries)) + b"".join(entries)


def register(network: Network, rank: int, endpoint: str, seconds: float = 0.0) -> dict[int, str]:
    """Enter where `rank` listens. Return where those listen that entered before, by rank.

    For `seconds` it tries again to reach the directory. Raises OSError if it cannot.
    """
    handshake = again(partial(connect_to, network.directory, network.secret), seconds, (OSError,))
    with handshake.connection:  # an entry is made once: each pair of processes connects once
        handshake.send(_ENTRY.pack(rank, endpoint.encode()))
        (num_entries,) = _NUM_ENTRIES.unpack(handshake.receive(_NUM_ENTRIES.size))
        entries = [_ENTRY.unpack(handshake.receive(_ENTRY.size)) for _ in range(num_entries)]
    return {other: name.rstrip(b"\0").decode() for other, name in entries}
