"""Callers that are slow, or many, keep no peer from joining."""

import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from dripping import dripping, tcp
from served import wait_until

from loong.core.errors import ClusterError
from loong.fabric.memory.memory_server import MemoryServer, fetch_memory
from loong.fabric.messages import peer_directory, peer_registry
from loong.fabric.messages.handshake import Handshake, again
from loong.fabric.messages.mailbox import MessageQueue
from loong.fabric.messages.network import Network
from loong.fabric.messages.peer_directory import PeerDirectory, register
from loong.fabric.messages.peer_registry import PeerRegistry, hello, listen
from loong.fabric.messages.tcp import endpoint_of, listen_at
from loong.fabric.messages.welcoming import MAX_PENDING, Welcoming
from loong.fabric.traffic import Plane
from loong.fabric.world import World

ADDRESSES = ("127.0.0.2", "127.0.0.3")
SECRET = "the secret of this start"
GREETING = b"loong\x00\x02\n" + bytes(32)  # a valid one, so that nothing but time ends it
MANY = 2 * MAX_PENDING
DEADLINE = 60.0  # more than a test may take
HOSTS = World(2, 1, (0, 1))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loong-") as name:
        yield Path(name)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let handshakes take longer than a test."""
    for module in (peer_directory, peer_registry):
        monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 10 * DEADLINE)


@pytest.fixture
def directory() -> Iterator[PeerDirectory]:
    with closing(PeerDirectory(ADDRESSES[0], SECRET)) as found:
        yield found


def network(directory: PeerDirectory, host_id: int = 0) -> Network:
    return Network(ADDRESSES[host_id], directory.endpoint, SECRET)


@contextmanager
def registry_of(
    rank: int, folder: Path, directory: PeerDirectory | None = None, world: World = HOSTS
) -> Iterator[PeerRegistry]:
    own = folder if directory is None else folder / f"host-{rank}"
    own.mkdir(exist_ok=True)
    seen = None if directory is None else network(directory, rank)
    with closing(PeerRegistry(own, world, rank, MessageQueue(world), DEADLINE, seen)) as found:
        yield found


def endpoint_of_peer(directory: PeerDirectory, rank: int) -> str:
    """Return where a peer listens."""
    endpoint = register(network(directory), 7, "127.0.0.2:7")[rank]
    directory.forget(7)
    return endpoint


def unix(path: Path) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return connection

    return connect


def test_a_process_registers_while_strangers_drip_bytes(patient: None, directory: PeerDirectory) -> None:
    with dripping(tcp(directory.endpoint), MAX_PENDING - 1, GREETING) as drippers:
        assert register(network(directory), 0, "127.0.0.2:7", DEADLINE) == {}
        assert all(drippers.are_open())


def test_the_oldest_of_too_many_strangers_are_dropped_and_counted(
    patient: None, directory: PeerDirectory
) -> None:
    with dripping(tcp(directory.endpoint), MANY, GREETING) as drippers:
        num_dropped = MANY - MAX_PENDING
        wait_until(
            lambda: drippers.are_open() == [False] * num_dropped + [True] * MAX_PENDING,
            DEADLINE,
            "the oldest to be dropped",
        )
        wait_until(lambda: directory.num_strays == num_dropped, DEADLINE, "strangers to be counted")
        assert register(network(directory), 0, "127.0.0.2:7", DEADLINE) == {}


def test_bytes_that_arrive_do_not_put_off_the_end_of_a_handshake(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peer_directory, "HANDSHAKE_SECONDS", 1.0)
    with (
        closing(PeerDirectory(ADDRESSES[0], SECRET)) as directory,
        dripping(tcp(directory.endpoint), 8, GREETING) as drippers,
    ):
        wait_until(lambda: not any(drippers.are_open()), DEADLINE, "the strangers to be dropped")
        wait_until(lambda: directory.num_strays == 8, DEADLINE, "strangers to be counted")
    assert "its handshake took longer than 1 s" in caplog.text


def test_peers_of_two_hosts_connect_while_strangers_drip_bytes_on_every_port(
    patient: None, directory: PeerDirectory, folder: Path
) -> None:
    with (
        registry_of(0, folder, directory) as first,
        dripping(tcp(endpoint_of_peer(directory, 0)), MANY, GREETING) as at_the_peer,
        dripping(tcp(directory.endpoint), MANY, GREETING) as at_the_directory,
        registry_of(1, folder, directory) as second,
    ):
        first.wait_for_all([1])
        second.wait_for_all([0])
        assert any(at_the_peer.are_open())
        assert any(at_the_directory.are_open())


def test_peers_of_a_host_connect_while_strangers_drip_bytes(folder: Path) -> None:
    world = World(2, 1)
    with (
        registry_of(0, folder, world=world) as first,
        dripping(unix(folder / "0.sock"), MANY, hello(1, Plane.BATCH)[:8]),
        registry_of(1, folder, world=world) as second,
    ):
        first.wait_for_all([1])
        second.wait_for_all([0])


@pytest.mark.parametrize(
    "error", [ConnectionResetError, BrokenPipeError, ConnectionAbortedError, BlockingIOError]
)
def test_a_call_is_made_again_when_there_were_too_many_callers(error: type[OSError]) -> None:
    attempts = iter((error, error))

    def attempt() -> str:
        if (raised := next(attempts, None)) is not None:
            raise raised
        return "welcome"

    assert again(attempt, DEADLINE) == "welcome"
    with pytest.raises(error):
        again(lambda: (_ for _ in ()).throw(error), 0)


def test_registration_tries_again_when_its_connection_is_dropped(directory: PeerDirectory) -> None:
    """The first connections end before the directory says a word."""
    num_dropped = 0

    def greet(handshake: Handshake) -> bool:
        nonlocal num_dropped
        if num_dropped == 3:
            return directory._greet(handshake)
        num_dropped += 1
        return False

    listener = listen_at(ADDRESSES[0])
    with closing(Welcoming(listener, DEADLINE, greet)):
        crowded = Network(ADDRESSES[0], endpoint_of(listener), SECRET)
        assert register(crowded, 0, "127.0.0.2:7", DEADLINE) == {}
    assert num_dropped == 3


def test_a_directory_that_is_gone_is_reported_at_once() -> None:
    with closing(PeerDirectory(ADDRESSES[0], SECRET)) as directory:
        gone = network(directory)
    with pytest.raises(ConnectionRefusedError):
        register(gone, 0, "127.0.0.2:7", 10 * DEADLINE)


def test_a_listener_without_descriptors_drops_strangers_to_have_some(
    patient: None, directory: PeerDirectory
) -> None:
    with (
        tcp(directory.endpoint)() as last,
        dripping(tcp(directory.endpoint), MAX_PENDING - 1, GREETING) as drippers,
    ):
        wait_until(lambda: len(directory._welcoming._threads) == MAX_PENDING, DEADLINE, "all to be accepted")
        last.close()
        with socket.socket() as one_more, no_descriptors():
            address, _, port = directory.endpoint.rpartition(":")
            one_more.connect((address, int(port)))
            assert register(network(directory), 0, "127.0.0.2:7", DEADLINE) == {}
        assert drippers.are_open()[-1]


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing until it has closed something."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        yield


def test_closing_drops_those_that_are_still_dripping(directory: PeerDirectory) -> None:
    with dripping(tcp(directory.endpoint), 8, GREETING) as drippers:
        wait_until(lambda: len(directory._welcoming._threads) == 8, DEADLINE, "all to be accepted")
        directory._welcoming.close()
        assert not any(drippers.are_open())
    directory._welcoming = Welcoming(listen_at(ADDRESSES[0]), DEADLINE, directory._greet)  # for the fixture


def test_memory_is_given_while_others_take_nothing(folder: Path) -> None:
    with (folder / "memory").open("w+b") as memory, ExitStack() as stack:
        stack.enter_context(closing(MemoryServer(folder / "server", memory.fileno(), 8)))
        for _ in range(8):
            stack.enter_context(unix(folder / "server")())
        descriptor = fetch_memory(folder / "server", 8, DEADLINE)
        stack.callback(os.close, descriptor)
        assert os.path.sameopenfile(descriptor, memory.fileno())


def test_memory_of_a_server_that_gives_none_is_awaited_to_the_deadline(folder: Path) -> None:
    listener = listen(folder / "server")
    with (
        closing(Welcoming(listener, DEADLINE, lambda _: False)),
        pytest.raises(ClusterError, match=r"no process offered memory at .*server within 0\.2 s"),
    ):
        fetch_memory(folder / "server", 8, 0.2)
