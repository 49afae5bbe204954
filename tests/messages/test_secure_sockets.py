"""ZeroMQ sockets between hosts take messages only of those that know the secret."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event

import pytest
import zmq
from dripping import dripping, tcp
from served import wait_until

from loong.core.errors import ConfigError
from loong.messages import secure_sockets
from loong.messages.secure_sockets import (
    ConnectionWatch,
    connect_securely,
    is_wildcard,
    listen_securely,
    new_secret,
)
from loong.messages.stray_frames import StrayFrames

SECONDS = 30
NUM_DRIPPERS = 200
ZEROMQ_GREETING = b"\xff" + bytes(8) + b"\x7f\x03"


@dataclass(frozen=True)
class Listening:
    """A socket that takes messages at an endpoint, and what is known of those that connect."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    incoming: "zmq.Socket[bytes]"
    endpoint: str
    secret: str
    strays: StrayFrames
    has_left: Event
    others: "list[zmq.Socket[bytes]]" = field(default_factory=list)

    def socket(self) -> "zmq.Socket[bytes]":
        """Return a socket that is closed at the end."""
        self.others.append(self.context.socket(zmq.PUSH))
        return self.others[-1]

    def connected(self, secret: str | None = None) -> "zmq.Socket[bytes]":
        """Return a socket that was connected with a secret."""
        outgoing = self.socket()
        connect_securely(outgoing, self.endpoint, self.secret if secret is None else secret)
        return outgoing

    def wait_for_strays(self, number: int) -> None:
        wait_until(lambda: self.strays.num_dropped == number, SECONDS, f"{number} strangers to be counted")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let handshakes take longer than a test."""
    monkeypatch.setattr(secure_sockets, "_HANDSHAKE_MS", 1_000_000)


@pytest.fixture
def listening() -> Iterator[Listening]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incoming = context.socket(zmq.PULL)
    incoming.setsockopt(zmq.RCVTIMEO, 1000 * SECONDS)
    strays, has_left, secret = StrayFrames("a socket"), Event(), new_secret()
    watch = ConnectionWatch(incoming, strays, has_left.set)
    endpoint = listen_securely(incoming, "tcp://127.0.0.2:*", secret)
    found = Listening(context, incoming, endpoint, secret, strays, has_left)
    yield found
    watch.close()
    for each in (incoming, *found.others):
        each.close(linger=0)
    context.term()


def test_messages_arrive_from_those_that_know_the_secret(listening: Listening) -> None:
    assert is_wildcard("tcp://127.0.0.2:*")
    assert not is_wildcard(listening.endpoint)
    for number in range(3):
        listening.connected().send(f"message {number}".encode())
        assert listening.incoming.recv() == f"message {number}".encode()
    assert listening.strays.num_dropped == 0


def test_connections_without_the_secret_are_closed_and_counted(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    listening.connected(new_secret())
    listening.wait_for_strays(1)
    plain = listening.socket()
    plain.setsockopt(zmq.RECONNECT_IVL, -1)
    plain.connect(listening.endpoint)
    plain.send(b"a message of a stranger", zmq.NOBLOCK)
    listening.wait_for_strays(2)
    port = int(listening.endpoint.rpartition(":")[2])
    with socket.create_connection(("127.0.0.2", port), timeout=SECONDS) as other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
        listening.wait_for_strays(3)
    assert "dropped a connection without the secret on a socket" in caplog.text
    listening.connected().send(b"of a friend")
    assert listening.incoming.recv() == b"of a friend"


def test_it_is_reported_when_a_peer_leaves_but_not_when_a_stranger_does(listening: Listening) -> None:
    friend = listening.connected()
    friend.send(b"here")
    listening.incoming.recv()
    listening.connected(new_secret())
    listening.wait_for_strays(1)
    assert not listening.has_left.is_set()
    friend.close()
    assert listening.has_left.wait(SECONDS)
    assert listening.strays.num_dropped == 1


def test_messages_arrive_while_strangers_drip_bytes(listening: Listening) -> None:
    with dripping(tcp(listening.endpoint), NUM_DRIPPERS, ZEROMQ_GREETING) as drippers:
        listening.connected().send(b"of a friend")
        assert listening.incoming.recv() == b"of a friend"
        wait_until(lambda: not any(drippers.are_open()), SECONDS, "the strangers to be dropped")
        listening.wait_for_strays(NUM_DRIPPERS)
        listening.connected().send(b"of another")
        assert listening.incoming.recv() == b"of another"
    assert not listening.has_left.is_set()


def test_a_peer_that_leaves_is_noticed_while_strangers_stay(patient: None, listening: Listening) -> None:
    friend = listening.connected()
    friend.send(b"here")
    listening.incoming.recv()
    with dripping(tcp(listening.endpoint), NUM_DRIPPERS, ZEROMQ_GREETING) as drippers:
        listening.connected(new_secret())
        listening.wait_for_strays(1)
        assert not listening.has_left.is_set()
        friend.close()
        assert listening.has_left.wait(SECONDS)
        assert all(drippers.are_open())


def test_an_address_of_another_host_is_named(listening: Listening) -> None:
    socket_elsewhere = listening.socket()
    with pytest.raises(ConfigError, match=r"this host cannot listen at tcp://192\.0\.2\.1:\*: "):
        listen_securely(socket_elsewhere, "tcp://192.0.2.1:*", listening.secret)
