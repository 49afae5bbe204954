"""Properties of sockets alone."""

import socket
import struct
import tempfile
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from served import wait_until
from socket_worlds import run_in_world

import loong.fabric.messages.peer_registry
from loong.fabric.errors import DeadlineError, InvalidMessageError
from loong.fabric.messages.link import Link
from loong.fabric.messages.mailbox import MessageQueue
from loong.fabric.messages.peer_registry import PeerRegistry, hello
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import ring_step
from loong.fabric.traffic import Plane
from loong.fabric.world import World


def expect_too_little(fabric: SocketFabric, instance_id: int, tp_rank: int) -> None:
    x = torch.zeros(2, 3)
    with (
        pytest.raises(InvalidMessageError, match=r"24 bytes came from rank . where 12 were expected"),
        fabric.batch(0, (0, 1)) as batch,
    ):
        ring_step(batch, (0, 1), x, x[0].clone()).wait()


def test_a_message_of_another_size_than_expected_is_reported() -> None:
    run_in_world(expect_too_little, World(2, 1))


def count_what_is_held() -> tuple[int, int]:
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def come_and_go(rank: int, directory: Path) -> bool:
    before = count_what_is_held()
    with closing(SocketFabric(directory, World(2, 1), rank, deadline=30.0)) as fabric:
        fabric.wait_for_peers()
        with fabric.batch(0, (0, 1)) as batch:
            batch.exchange_control((0, 1), torch.zeros(1, dtype=torch.int64))
    return count_what_is_held() == before


def test_closing_leaves_no_thread_no_descriptor_and_no_socket() -> None:
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        assert run_on_ranks(come_and_go, 2, Path(directory)) == [True, True]
        assert [path.suffix for path in Path(directory).iterdir()] == [".lock"]


def test_who_joins_is_welcomed_before_anything_can_be_sent_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    came_first = list[bytes]()

    def look_then_link(*args: Any) -> Link:
        came_first.append(newcomer.recv(1, socket.MSG_DONTWAIT))
        return Link(*args)

    monkeypatch.setattr(loong.fabric.messages.peer_registry, "Link", look_then_link)
    with tempfile.TemporaryDirectory(prefix="loong-") as directory, socket.socket(socket.AF_UNIX) as newcomer:
        peer_registry = PeerRegistry(Path(directory), World(2, 1), 0, MessageQueue(World(2, 1)), deadline=5.0)
        newcomer.connect(f"{directory}/0.sock")
        newcomer.sendall(hello(1, Plane.BATCH))
        wait_until(lambda: peer_registry.num_joins(1) == 1, 60, "the newcomer to be linked")
        peer_registry.close()
    assert came_first == [b"\x01"]


STRAYS = (
    b"\x00",
    bytes(8),
    bytes(16),
    b"GET / HTTP/1.1\r\n\r\n",
    hello(0, Plane.BATCH),  # of the process itself
    hello(4, Plane.BATCH),  # of no instance
    hello(1, Plane.MIGRATION),  # of another rank, with which there are no migrations
    hello(2, Plane.BATCH)[:-4] + struct.pack("<I", 7),
)


def test_what_is_no_hello_is_counted_and_dropped_and_peers_can_still_join() -> None:
    world, answers = World(2, 2), list[bytes]()
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        peer_registry = PeerRegistry(Path(directory), world, 0, MessageQueue(world), deadline=5.0)
        for frame in (*STRAYS, b"", hello(2, Plane.BATCH)):
            with socket.socket(socket.AF_UNIX) as newcomer:
                newcomer.connect(f"{directory}/0.sock")
                newcomer.sendall(frame)
                newcomer.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):  # there was more than was read
                    answers.append(newcomer.recv(1))
        assert answers[-1] == b"\x01"
        assert not any(answers[:-1])
        assert peer_registry.strays.num_dropped == len(STRAYS)
        wait_until(lambda: peer_registry.num_joins(2) == 1, 60, "the newcomer to be linked")
        assert [peer_registry.num_joins(rank) for rank in range(world.size)] == [0, 0, 1, 0]
        peer_registry.close()


def test_a_world_that_stays_incomplete_names_who_is_missing(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="loong-") as directory:
        fabric = SocketFabric(Path(directory), World(2, 2), 0, deadline=0.01)
        with closing(fabric), pytest.raises(DeadlineError, match=r"instance 0 \(tensor-parallel rank 1\)"):
            fabric.wait_for_peers()


def test_a_directory_whose_name_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    with pytest.raises(InvalidMessageError, match="longer than the 107 bytes"):
        SocketFabric(directory, World(1, 1), 0, deadline=1.0)
