"""Who has joined: a directory of Unix sockets in which processes find one another, now or after a restart.

One process joins at a time (a file lock): it listens, then dials whoever listens already.
So each pair connects exactly once, whoever comes first, and a restarted process joins like a new one.
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
_MARK = b"loong\x00\x01\n"  # which no stray frame begins with
_WELCOME = b"\x01"
_LONGEST_SOCKET_PATH = 107  # Linux, sun_path without its closing zero


class PeerRegistry:
    """The live connections of this process, kept up to date while peers come, go and come back."""

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
        """Return once every process of the world is connected; DeadlineError names the first that is not."""

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
        """The connection to a peer; PeerLostError if there is none or it is lost."""
        with self._changed:
            link = self._links.get((peer, plane))
        if link is None or link.is_lost:
            raise PeerLostError(verb, *self._world.place(peer))
        return link

    def num_joins(self, peer: int) -> int:
        """How often a peer has connected for its batches."""
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
            except OSError:  # not there yet, or no longer: it dials us when it joins
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
            except OSError:  # it died while joining
                pass
            connection.close()

    def _newcomer(self, frame: bytes) -> tuple[int, Plane] | None:
        """Return which peer a hello is of, and for which plane; None if it is no hello."""
        if len(frame) != _HELLO.size:
            return None
        mark, peer, plane = _HELLO.unpack(frame)
        is_peer = mark == _MARK and peer < self._world.size and plane in self._planes(peer)
        return (peer, Plane(plane)) if is_peer else None

    def _add(self, peer: int, plane: Plane, connection: socket.socket, greet: bytes = b"") -> None:
        # Whoever looks for the link sends after the welcome, and finds it if that has come.
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
    """A socket that takes connections at `path`, in the place of what is left of an earlier process."""
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
                raise ClusterError(f"another process holds {path} for more than {deadline:g} s")
            sleep(0.005)
        yield
