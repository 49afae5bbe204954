"""One link, its other end held by the test: what leaves at once, what waits its turn, what goes wrong."""

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from loong.fabric.errors import DeadlineError, PeerLostError
from loong.fabric.link import Link
from loong.fabric.mailbox import Address, Mailbox
from loong.fabric.traffic import Channel
from loong.fabric.world import World

WORLD = World(2, 1)
HEADER = struct.Struct("<QQQ")
LARGE = bytes(range(256)) * (1 << 14)  # 4 MB: no socket's buffer holds it
SMALL = b"small"
NEVER = 600.0


def send(link: Link, batch_id: int, payload: bytes) -> Future[None] | None:
    return link.send(Address(Channel.RING, batch_id, 0), memoryview(payload))


def read_frame(peer: socket.socket) -> tuple[int, bytes]:
    """The batch id and the payload of the next frame."""
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


def make_link(ours: socket.socket, deadline: float = NEVER) -> Link:
    return Link(WORLD, 1, ours, Mailbox(WORLD), deadline)


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
