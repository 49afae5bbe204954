"""Connections between hosts are only for those that know the secret of a start, and prove it."""

import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from served import wait_until

from loong.core.errors import ClusterError
from loong.fabric.messages.mailbox import MessageQueue
from loong.fabric.messages.network import Network
from loong.fabric.messages.peer_directory import PeerDirectory, register
from loong.fabric.messages.peer_registry import PeerRegistry
from loong.fabric.messages.tcp import StrangerError, connect_to
from loong.fabric.world import World

ADDRESS = "127.0.0.2"
SECRET = "the secret of this start"
STRANGERS = (b"", b"GET / HTTP/1.1\r\n\r\n", b"loong\x00\x02\n", bytes(8) + bytes(32), bytes(200))


@pytest.fixture
def directory() -> Iterator[PeerDirectory]:
    with closing(PeerDirectory(ADDRESS, SECRET)) as found:
        yield found


def network(directory: PeerDirectory, secret: str = SECRET) -> Network:
    return Network(ADDRESS, directory.endpoint, secret)


def answer_to(endpoint: str, frame: bytes) -> bytes:
    """Return what listens there sends to a stranger, until it closes."""
    address, _, port = endpoint.rpartition(":")
    answer = b""
    with socket.create_connection((address, int(port)), timeout=30) as stranger:
        stranger.sendall(frame)
        with suppress(OSError):  # closed already
            stranger.shutdown(socket.SHUT_WR)
            while part := stranger.recv(1024):
                answer += part
    return answer


def test_the_directory_names_those_that_registered_before(directory: PeerDirectory) -> None:
    assert register(network(directory), 1, "127.0.0.3:7") == {}
    assert register(network(directory), 0, "127.0.0.2:8") == {1: "127.0.0.3:7"}
    assert register(network(directory), 1, "127.0.0.3:9") == {0: "127.0.0.2:8"}
    assert register(network(directory), 2, "127.0.0.3:6") == {0: "127.0.0.2:8", 1: "127.0.0.3:9"}
    directory.forget(1)
    assert register(network(directory), 0, "127.0.0.2:8") == {2: "127.0.0.3:6"}


def test_with_another_secret_nobody_registers(directory: PeerDirectory) -> None:
    with pytest.raises(StrangerError, match="the proof of the listener is wrong"):
        register(network(directory, "another secret"), 1, "127.0.0.3:7")
    wait_until(lambda: directory.num_strays == 1, 60, "the stranger to be counted")
    assert register(network(directory), 0, "127.0.0.2:8") == {}


def test_the_directory_closes_connections_without_the_secret(
    directory: PeerDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for frame in STRANGERS:
        assert len(answer_to(directory.endpoint, frame)) in (0, 64)  # nothing, or its own proof
    wait_until(lambda: directory.num_strays == len(STRANGERS), 60, "strangers to be counted")
    assert "dropped a connection without the secret on the directory of peers" in caplog.text
    assert register(network(directory), 0, "127.0.0.2:8") == {}


def test_a_replayed_proof_is_worth_nothing(directory: PeerDirectory) -> None:
    """A stranger cannot enter as a caller with the answer of a listener."""
    address, _, port = directory.endpoint.rpartition(":")
    with socket.create_connection((address, int(port)), timeout=30) as stranger:
        stranger.sendall(b"loong\x00\x02\n" + bytes(32))
        answer = stranger.recv(64, socket.MSG_WAITALL)
        stranger.sendall(answer[32:] + bytes(68))
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    wait_until(lambda: directory.num_strays == 1, 60, "the stranger to be counted")


def registered_endpoint(directory: PeerDirectory, rank: int) -> str:
    """Return the address of a process, as the directory gives it to later ones."""
    return register(network(directory), 7, "127.0.0.3:7")[rank]


def with_registry(directory: PeerDirectory, check: Callable[[PeerRegistry, str], None]) -> None:
    world = World(2, 1, (0, 1))
    with tempfile.TemporaryDirectory(prefix="loong-") as folder:
        mailbox = MessageQueue(world)
        with closing(PeerRegistry(Path(folder), world, 0, mailbox, 5.0, network(directory))) as registry:
            check(registry, registered_endpoint(directory, 0))


def test_a_peer_without_the_secret_is_not_linked(directory: PeerDirectory) -> None:
    def check(registry: PeerRegistry, endpoint: str) -> None:
        for frame in STRANGERS:
            answer_to(endpoint, frame)
        with pytest.raises(StrangerError):
            connect_to(endpoint, "another secret")
        num_strangers = len(STRANGERS) + 1
        wait_until(lambda: registry.strays.num_dropped == num_strangers, 60, "strangers to be counted")
        assert registry.num_joins(1) == 0

    with_registry(directory, check)


def test_a_process_listens_at_the_address_of_its_host_alone(directory: PeerDirectory) -> None:
    def check(_: PeerRegistry, endpoint: str) -> None:
        address, port = endpoint.split(":")
        assert address == ADDRESS
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)))

    with_registry(directory, check)


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(ClusterError, match=r"this host cannot listen at 192\.0\.2\.1: "):
        PeerDirectory("192.0.2.1", SECRET)
