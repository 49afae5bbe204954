"""The registry of peers: a directory of Unix sockets in which processes find each other, also after a
restart.

One process joins at a time (a file lock): it listens, then connects to all that listen already. So each pair
connects exactly once, in any order, and a restarted process joins like a new one.
"""

import fcntl
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Condition, Thread
from time import monotonic, sleep

from loong.core.errors import ClusterError
from loong.fabric.errors import DeadlineError, InvalidMessageError, PeerLostError
from loong.fabric.messages.link import Link
from loong.fabric.messages.mailbox import MessageQueue
from loong.fabric.traffic import Plane
from loong.fabric.waiting import wait_for
from loong.fabric.world import World
from loong.stray_frames import StrayFrames

_HELLO = struct.Struct("<8sII")  # mark, rank, plane
_MARK = b"loong\x00\x01\n"  # stray frames begin differently
_WELCOME = b"\x01"
_LONGEST_SOCKET_PATH = 107  # Linux, sun_path without its closing zero


class PeerRegistry:
    """The live connections of this process, updated as peers join and leave."""

    def __init__(
        self, directory: Path, world: World, rank: int, mailbox: MessageQueue, deadline: float
    ) -> None:
        self._directory = directory
        self._world = world
        self._rank = rank
        self._mailbox = mailbox
        self._deadline = deadline
        self._changed = Condition()
        self._links: dict[tuple[int, Plane], Link] = {}
        self._num_joins = [0] * world.size
        self.strays = StrayFrames(f"the socket where peers of {world.place(rank)} join")
        with _lock(directory / "join.lock", deadline):
            self._listener = listen(self._socket_path(rank))
            self._welcoming = Thread(target=self._greet_newcomers, name="fabric-welcome", daemon=True)
            self._welcoming.start()
            for peer in range(world.size):
                if peer != rank:
                    self._dial(peer)

    def wait_for_all(self) -> None:
        """Return once every process of the world is connected. DeadlineError names the first missing one."""

        def missing() -> int | None:
            wanted = ((peer, plane) for peer in range(self._world.size) for plane in self._planes(peer))
            links = ((peer, self._links.get((peer, plane))) for peer, plane in wanted)
            return next((peer for peer, link in links if link is None or link.is_lost), None)

        with self._changed:
            if not wait_for(self._changed, lambda: missing() is None, self._deadline):
                peer = missing()
                assert peer is not None
                raise DeadlineError("joining", *self._world.place(peer), self._deadline)

    def link(self, peer: int, plane: Plane, verb: str) -> Link:
        """Return the connection to a peer. Raises PeerLostError if there is none or it is lost."""
        with self._changed:
            link = self._links.get((peer, plane))
        if link is None or link.is_lost:
            raise PeerLostError(verb, *self._world.place(peer))
        return link

    def num_joins(self, peer: int) -> int:
        """Return how often a peer has connected for its batches."""
        return self._num_joins[peer]

    def close(self) -> None:
        """Stop listening, cut every connection, end every thread."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._welcoming.join()
        self._listener.close()
        self._socket_path(self._rank).unlink(missing_ok=True)
        for link in self._links.values():
            link.close()

    def _planes(self, peer: int) -> tuple[Plane, ...]:
        if peer == self._rank:
            return ()
        is_counterpart = self._world.tp_rank(peer) == self._world.tp_rank(self._rank)
        return tuple(Plane) if is_counterpart else (Plane.BATCH,)

    def _socket_path(self, rank: int) -> Path:
        return self._directory / f"{rank}.sock"

    def _dial(self, peer: int) -> None:
        for plane in self._planes(peer):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(self._deadline)
            try:
                connection.connect(str(self._socket_path(peer)))
                connection.sendall(hello(self._rank, plane))
                is_welcome = connection.recv(1) == _WELCOME
            except OSError:  # absent; it connects to us when it joins
                is_welcome = False
            if not is_welcome:
                connection.close()
                return
            self._add(peer, plane, connection)

    def _greet_newcomers(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was shut down
                return
            try:
                connection.settimeout(self._deadline)
                frame = connection.recv(_HELLO.size)
                if (newcomer := self._newcomer(frame)) is not None:
                    self._add(*newcomer, connection, greet=_WELCOME)
                    continue
                if frame:
                    self.strays.drop("a frame that is no hello of a peer", repr(frame))
            except OSError:  # the peer died while joining
                pass
            connection.close()

    def _newcomer(self, frame: bytes) -> tuple[int, Plane] | None:
        """Return the rank and the plane in a hello frame, or None for another frame."""
        if len(frame) != _HELLO.size:
            return None
        mark, peer, plane = _HELLO.unpack(frame)
        is_peer = mark == _MARK and peer < self._world.size and plane in self._planes(peer)
        return (peer, Plane(plane)) if is_peer else None

    def _add(self, peer: int, plane: Plane, connection: socket.socket, greet: bytes = b"") -> None:
        # The peer sends after the welcome, so its link must exist before the welcome.
        with self._changed:
            connection.sendall(greet)
            link = Link(self._world, peer, connection, self._mailbox, self._deadline)
            previous = self._links.get((peer, plane))
            self._links[peer, plane] = link
            self._num_joins[peer] += plane is Plane.BATCH
            self._changed.notify_all()
        if previous is not None:
            previous.close()


def hello(rank: int, plane: Plane) -> bytes:
    """Return the first frame of the process `rank` on a new connection."""
    return _HELLO.pack(_MARK, rank, plane)


def listen(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, and replaces the socket of an earlier process."""
    if len(bytes(path)) > _LONGEST_SOCKET_PATH:
        raise InvalidMessageError(
            f"{path} is longer than the {_LONGEST_SOCKET_PATH} bytes a socket's path may have"
        )
    path.unlink(missing_ok=True)  # left by a process that was killed
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


@contextmanager
def _lock(path: Path, deadline: float) -> Iterator[None]:
    end = monotonic() + deadline
    with path.open("w") as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if monotonic() > end:
                raise ClusterError(f"another process has locked {path} for more than {deadline:g} s")
            sleep(0.005)
        yield
