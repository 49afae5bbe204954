"""One link, its other end held by the test: what leaves at once, what waits its turn, what goes wrong."""

import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from torch import Tensor

from loong.fabric.errors import DeadlineError, InvalidMessageError, PeerLostError
from loong.fabric.messages.link import Link
from loong.fabric.messages.mailbox import Address, MessageQueue
from loong.fabric.traffic import Channel
from loong.fabric.world import World

WORLD = World(2, 1)
HEADER = struct.Struct("<QQQ")
LARGE = bytes(range(256)) * (1 << 14)  # 4 MB: no socket's buffer holds it
SMALL = b"small"
LARGEST = 64 << 30
NEVER = 600.0


def send(link: Link, batch_id: int, payload: bytes) -> Future[None] | None:
    return link.send(Address(Channel.RING, batch_id, 0), memoryview(payload))


def read_frame(peer: socket.socket) -> tuple[int, bytes]:
    """Return the batch id and the payload of the next frame."""
    channel, batch_id, num_bytes = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL))
    assert channel == Channel.RING
    payload = bytearray(num_bytes)
    assert peer.recv_into(payload, flags=socket.MSG_WAITALL) == num_bytes
    return batch_id, bytes(payload)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def make_link(ours: socket.socket, deadline: float = NEVER, mailbox: MessageQueue | None = None) -> Link:
    return Link(WORLD, 1, ours, mailbox or MessageQueue(WORLD), deadline)


def test_a_small_frame_is_gone_at_once(ends: tuple[socket.socket, socket.socket]) -> None:
    link = make_link(ends[0])
    assert send(link, 0, SMALL) is None
    assert read_frame(ends[1]) == (0, SMALL)
    link.close()


def test_frames_behind_one_that_nobody_reads_yet_keep_their_order(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    link = make_link(ends[0])
    payloads = [LARGE, SMALL, LARGE[::-1], SMALL]
    sent = [send(link, i, payload) for i, payload in enumerate(payloads)]
    assert [future is not None and not future.done() for future in sent] == [True] * 4
    assert [read_frame(ends[1]) for _ in payloads] == [(i, payload) for i, payload in enumerate(payloads)]
    assert [future and future.result(30) for future in sent] == [None] * 4
    assert send(link, 4, SMALL) is None
    link.close()


def test_a_peer_that_reads_nothing_is_an_error_at_the_deadline_and_the_link_is_lost(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    link = make_link(ends[0], deadline=0.05)
    sent, behind = send(link, 0, LARGE), send(link, 1, SMALL)
    assert sent is not None
    assert behind is not None
    with pytest.raises(DeadlineError, match=r"ring of batch 0: instance 1 .* was silent for 0.05 s"):
        sent.result(30)
    with pytest.raises(PeerLostError, match="ring of batch 1: instance 1"):
        behind.result(30)
    link.close()
    with pytest.raises(PeerLostError, match="ring of batch 2: instance 1"):
        send(link, 2, SMALL)


def test_a_peer_that_goes_ends_what_is_under_way(ends: tuple[socket.socket, socket.socket]) -> None:
    link = make_link(ends[0])
    sent = send(link, 0, LARGE)
    ends[1].close()
    assert sent is not None
    assert isinstance(sent.exception(30), PeerLostError)
    link.close()


def test_closing_ends_what_is_under_way_and_leaves_no_thread(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    before = threading.active_count()
    link = make_link(ends[0])
    sent = send(link, 0, LARGE)
    assert threading.active_count() == before + 2
    link.close()
    assert threading.active_count() == before
    assert sent is not None
    assert isinstance(sent.exception(0), PeerLostError)


def assert_waits_fail(link: Link, mailbox: MessageQueue) -> None:
    """A wait for the peer of `link` ends because it is lost, whose link is then cut."""
    with pytest.raises(PeerLostError, match="ring of batch 0: instance 1"):
        mailbox.take(Address(Channel.RING, 0, 1), (link,), NEVER)
    assert link.is_lost


@pytest.mark.parametrize("header", [(1, 0, LARGEST + 1), (1, 0, (1 << 64) - 1), (99, 0, 0)])
def test_a_damaged_header_ends_the_waits_on_the_peer(
    ends: tuple[socket.socket, socket.socket], header: tuple[int, int, int]
) -> None:
    mailbox = MessageQueue(WORLD)
    link = make_link(ends[0], mailbox=mailbox)
    ends[1].sendall(HEADER.pack(*header))
    assert_waits_fail(link, mailbox)
    assert ends[1].recv(1) == b""
    link.close()


class FullMailbox(MessageQueue):
    """A mailbox that has no room."""

    def deliver(self, address: Address, message: Tensor) -> None:
        raise MemoryError


def test_an_error_of_the_reader_itself_ends_the_waits_too_and_is_not_hidden(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_type))
    mailbox = FullMailbox(WORLD)
    link = make_link(ends[0], mailbox=mailbox)
    ends[1].sendall(HEADER.pack(Channel.RING, 0, 0))
    assert_waits_fail(link, mailbox)
    link.close()
    assert errors == [MemoryError]


def test_a_message_longer_than_a_frame_may_be_is_refused(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    link = make_link(ends[0])
    hole = tmp_path / "hole"  # takes neither memory nor disk
    hole.touch()
    os.truncate(hole, LARGEST + 1)
    with (
        hole.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
        memoryview(memory) as payload,
        pytest.raises(InvalidMessageError, match=f"ring of batch 0: {LARGEST + 1} bytes"),
    ):
        link.send(Address(Channel.RING, 0, 0), payload)
    assert send(link, 1, SMALL) is None
    link.close()
