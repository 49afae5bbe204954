"""Frames of any other process of the same user on the private sockets of a server end nothing."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from random import Random

import httpx
import msgspec
import pytest
import zmq
from served import Served, served, wait_until
from wire_samples import COMMANDS, REPORTS

from loong.fabric.messages.peer_registry import hello
from loong.fabric.traffic import Plane
from loong.messages.wire import (
    BatchDone,
    CommandDone,
    Heartbeat,
    MigrationDone,
    StepDone,
    WorkerFailed,
    WorkerReady,
    encode,
)

NUM_RANDOM = 100
LARGE = 100 << 20  # bytes
BODIES: tuple[object, ...] = (None, [], 7, [[[[]]]])
SHAPES: tuple[object, ...] = (
    None,
    3,
    [],
    ["Heartbeat"],
    ("Nobody", {}),
    {"Shutdown": {}},
    ("StopLease", {"batch_id": "seven"}),
)
LINGER_MS = 30_000  # for queued frames of a socket to leave
IMPOSSIBLE = (
    Heartbeat(9, 0),
    WorkerReady(0, 9),
    WorkerFailed(-1, 0, "of nobody"),
    CommandDone(1, 9, 9),
    StepDone(1 << 40, 0, ()),
    BatchDone(1 << 40, 0, 0, 1),
    MigrationDone(1 << 40, 0, 0, is_committed=True),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("strays"), "--num-instances", "2") as running:
        yield running


def sockets_of(server: Served) -> dict[str, Path]:
    """Return the private sockets of a server, by their names."""
    (directory,) = server.run_directories
    assert directory.stat().st_mode & 0o077 == 0, "others can reach them"
    return {path.name: path for path in directory.iterdir() if path.is_socket()}


def frames(messages: Sequence[object], random: Random) -> list[bytes]:
    """Return frames that are no messages: parts of real ones, other shapes, and random bytes."""
    whole = [encode(message) for message in messages]
    names = [type(message).__name__ for message in messages]
    return [
        b"",
        *(frame[: random.randrange(len(frame))] for frame in whole),
        *(msgspec.msgpack.encode(pair) for pair in zip(names, cycle(BODIES), strict=False)),
        *map(msgspec.msgpack.encode, SHAPES),
        msgspec.msgpack.encode(("Heartbeat", 0))[:-1] + b"\x91" * 100_000 + b"\x00",
        *(random.randbytes(random.randrange(1, 300)) for _ in range(NUM_RANDOM)),
    ]


def send(path: Path, frames: Sequence[bytes]) -> None:
    """Send frames as ZeroMQ does, one by one, and some as the parts of one message."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as stray:
        stray.setsockopt(zmq.LINGER, LINGER_MS)
        stray.connect(f"ipc://{path}")
        for frame in frames:
            stray.send(frame)
        stray.send_multipart(frames[:5])


def send_raw(path: Path, random: Random) -> None:
    """Send what is not even ZeroMQ's."""
    for data in (
        bytes(64),
        b"GET / HTTP/1.1\r\n\r\n",
        hello(9, Plane.BATCH),
        *map(random.randbytes, (1, 8, 64, 4096)),
    ):
        with socket.socket(socket.AF_UNIX) as stray, suppress(BrokenPipeError, ConnectionResetError):
            stray.connect(str(path))
            stray.sendall(data)


def test_stray_frames_on_every_private_socket_are_counted_and_end_nothing(server: Served) -> None:
    random, sockets, workers = Random(0), sockets_of(server), server.worker_pids()
    assert sorted(sockets) == ["0.sock", "1.sock", "reports", "worker-0-0", "worker-1-0"]
    stray_reports = [*frames(REPORTS, random), bytes(LARGE), *map(encode, (*IMPOSSIBLE, *COMMANDS))]
    stray_commands = [*frames(COMMANDS, random), bytes(LARGE), *map(encode, REPORTS)]
    for path in sockets.values():
        send_raw(path, random)
    send(sockets["reports"], stray_reports)
    for name in ("worker-0-0", "worker-1-0"):
        send(sockets[name], stray_commands)
    num_sent = len(stray_reports) + 2 * len(stray_commands) + 3 * 5
    wait_until(
        lambda: server.metric("loong:stray_frames_total") >= num_sent, 60, f"{num_sent} frames to be counted"
    )
    answer = server.client.completions.create(
        model="loong-tiny", prompt=[5] * 100, max_tokens=20, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    assert server.worker_pids() == workers
    assert server.log.count("a frame that is no report") == 1
    assert server.log.count("a frame that is no command") == len(workers)
    assert server.log.count("a frame that is no hello") == len(workers)
