"""What is so of sockets alone."""

import socket
import struct
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_on_ranks
from served import wait_until
from socket_worlds import run_in_world

import loong.fabric.roster
from loong.fabric.errors import DeadlineError, InvalidMessageError
from loong.fabric.link import Link
from loong.fabric.mailbox import Mailbox
from loong.fabric.roster import Roster
from loong.fabric.sockets import SocketFabric
from loong.fabric.traffic import Plane
from loong.fabric.world import World


def expect_too_little(fabric: SocketFabric, instance_id: int, tp_rank: int) -> None:
    x = torch.zeros(2, 3)
    with (
        pytest.raises(InvalidMessageError, match=r"24 bytes came from rank . where 12 were expected"),
        fabric.batch(0, (0, 1)),
    ):
        fabric.ring_step((0, 1), x, x[0].clone()).wait()


def test_a_message_of_another_size_than_expected_is_told() -> None:
    run_in_world(expect_too_little, World(2, 1))


def count_what_is_held() -> tuple[int, int]:
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


def come_and_go(rank: int, directory: Path) -> bool:
    before = count_what_is_held()
    with closing(SocketFabric(directory, World(2, 1), rank, deadline=30.0)) as fabric:
        fabric.wait_for_peers()
        with fabric.batch(0, (0, 1)):
            fabric.exchange_control((0, 1), torch.zeros(1, dtype=torch.int64))
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

    monkeypatch.setattr(loong.fabric.roster, "Link", look_then_link)
    with tempfile.TemporaryDirectory(prefix="loong-") as directory, socket.socket(socket.AF_UNIX) as newcomer:
        roster = Roster(Path(directory), World(2, 1), 0, Mailbox(World(2, 1)), deadline=5.0)
        newcomer.connect(f"{directory}/0.sock")
        newcomer.sendall(struct.pack("<II", 1, Plane.BATCH))
        wait_until(lambda: roster.num_joins(1) == 1, 5, "the newcomer to be linked")
        roster.close()
    assert came_first == [b"\x01"]


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
