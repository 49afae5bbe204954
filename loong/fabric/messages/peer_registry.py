"""The registry of peers, in which processes find each other, also after a restart.

Those of one host meet in a directory of Unix sockets, those of different hosts over TCP by a `PeerDirectory`.
In the directory of sockets one process joins at a time (a file lock): it listens, then connects to all that
listen already. So each pair connects exactly once, in any order. A restarted process joins like a new one.
"""

import fcntl
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Condition
from time import monotonic, sleep

from loong.core.errors import ClusterError
from loong.fabric.errors import DeadlineError, InvalidMessageError, PeerLostError
from loong.fabric.messages.handshake import EarlyEndError, Handshake, again
from loong.fabric.messages.link import Link
from loong.fabric.messages.mailbox import MessageQueue
from loong.fabric.messages.network import Network
from loong.fabric.messages.peer_directory import register
from loong.fabric.messages.tcp import (
    BACKLOG,
    HANDSHAKE_SECONDS,
    StrangerError,
    admit,
    connect_to,
    endpoint_of,
    listen_at,
)
from loong.fabric.messages.welcoming import Welcoming
from loong.fabric.traffic import Plane
from loong.fabric.waiting import wait_for
from loong.fabric.world import World
from loong.messages.stray_frames import StrayFrames

_HELLO = struct.Struct("<8sII")  # mark, rank, plane
_MARK = b"loong\x00\x01\n"  # stray frames begin differently
_WELCOME = b"\x01"
_LONGEST_SOCKET_PATH = 107  # Linux, sun_path without its closing zero


class PeerRegistry:
    """The live connections of this process, updated as peers join and leave.

    Peers on the same host meet in `directory`, others in a `network`.
    """

    def __init__(
        self,
        directory: Path,
        world: World,
        rank: int,
        mailbox: MessageQueue,
        deadline: float,
        network: Network | None = None,
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
            listener = listen(self._socket_path(rank))
            self._welcoming = [Welcoming(listener, deadline, self._greet)]
            for peer in range(world.size):
                if peer != rank and self._is_local(peer):
                    self._dial(peer, partial(self._connect_to_socket, peer))
        if network is not None:
            self._join_other_hosts(network)

    def wait_for_all(self, peers: Iterable[int]) -> None:
        """Return once every one of `peers` is connected. DeadlineError names the first missing one."""
        awaited = tuple(peers)

        def missing() -> int | None:
            wanted = ((peer, plane) for peer in awaited for plane in self._planes(peer))
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
        for welcoming in self._welcoming:
            welcoming.close()
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

    def _is_local(self, peer: int) -> bool:
        """Return whether a peer is on this host."""
        return self._world.share_host(peer, self._rank)

    def _join_other_hosts(self, network: Network) -> None:
        listener = listen_at(network.address)
        greet = partial(self._greet_caller, network.secret)
        self._welcoming.append(Welcoming(listener, HANDSHAKE_SECONDS, greet))
        try:
            endpoints = register(network, self._rank, endpoint_of(listener), self._deadline)
        except OSError as error:
            raise ClusterError(f"the directory of peers at {network.directory}: {error}") from error
        for peer, endpoint in endpoints.items():
            if not self._is_local(peer):
                self._dial(peer, partial(connect_to, endpoint, network.secret))

    def _connect_to_socket(self, peer: int) -> Handshake:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(self._deadline)
        try:
            connection.connect(str(self._socket_path(peer)))
        except OSError:
            connection.close()
            raise
        return Handshake(connection, self._deadline)

    def _dial(self, peer: int, connect: Callable[[], Handshake]) -> None:
        for plane in self._planes(peer):
            try:
                again(partial(self._join, peer, plane, connect), HANDSHAKE_SECONDS)
            except (OSError, StrangerError):  # absent; it connects to us when it joins
                return

    def _join(self, peer: int, plane: Plane, connect: Callable[[], Handshake]) -> None:
        handshake = connect()
        try:
            handshake.send(hello(self._rank, plane))
            handshake.receive(len(_WELCOME))
        except OSError:
            handshake.close()
            raise
        self._add(peer, plane, handshake.connection)

    def _greet_caller(self, secret: str, handshake: Handshake) -> bool:
        """Greet a process of another host, if it knows the secret."""
        try:
            admit(handshake, secret)
        except StrangerError as error:
            self.strays.drop("a connection without the secret", str(error))
            return False
        return self._greet(handshake)

    def _greet(self, handshake: Handshake) -> bool:
        try:
            frame = handshake.receive(_HELLO.size)
        except EarlyEndError as error:
            frame = error.received
        if (newcomer := self._newcomer(frame)) is None:
            if frame:  # or else the peer died while joining
                self.strays.drop("a frame that is no hello of a peer", repr(frame))
            return False
        handshake.prove()
        self._add(*newcomer, handshake.connection, greet=_WELCOME)
        return True

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
    listener.listen(BACKLOG)
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
