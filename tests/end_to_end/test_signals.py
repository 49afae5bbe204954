"""The effect of signals, and of a log that is not read, on all processes of a server."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest
from child_processes import fork_servers_of, forked_of
from served import Served, assert_gone, free_port, served, wait_until

from loong.runs.spawned_server import ENTRY
from loong.server.api.listen import bound_socket

SMALLEST_PIPE, LARGE_PIPE = 4096, 2**20  # bytes


class LogReader:
    """Reads a server's log, a pipe that holds little, unless it is paused."""

    def __init__(self) -> None:
        self._receiving, self.sending = os.pipe()
        fcntl.fcntl(self.sending, fcntl.F_SETPIPE_SZ, SMALLEST_PIPE)
        self._may_read = Event()
        self._may_read.set()
        self._pieces: list[bytes] = []
        self._thread = Thread(target=self._read)
        self._thread.start()

    @property
    def text(self) -> str:
        """All that was read."""
        return b"".join(self._pieces).decode()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Read nothing, except the bytes of one system call."""
        self._may_read.clear()
        try:
            yield
        finally:
            self._may_read.set()

    def hold_more(self) -> None:
        """Let the pipe hold some large records, so that none is dropped on a busy machine."""
        fcntl.fcntl(self._receiving, fcntl.F_SETPIPE_SZ, LARGE_PIPE)

    def close(self) -> None:
        """Read to the end; the server has ended."""
        self._thread.join()
        os.close(self._receiving)

    def _read(self) -> None:
        while piece := os.read(self._receiving, SMALLEST_PIPE):
            self._pieces.append(piece)
            self._may_read.wait()


@pytest.fixture(scope="module")
def reader() -> Iterator[LogReader]:
    reader = LogReader()
    yield reader
    reader.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, reader: LogReader) -> Iterator[Served]:
    with served(
        tmp_path_factory.mktemp("signals"),
        *("--num-instances", "2", "--api-server-count", "2"),
        stderr=reader.sending,
    ) as running:
        yield running


def answers(server: Served) -> bool:
    return [chunk.choices[0].finish_reason for chunk in server.stream_of(10)][-1] == "length"


def num_dropped(server: Served) -> float:
    return server.metric("loong:log_records_dropped_total")


def fill_log(server: Served) -> None:
    """Have more written than there is room for; each request is for some kilobytes."""
    before = num_dropped(server)

    def is_full() -> bool:
        server.process.send_signal(signal.SIGUSR1)
        return num_dropped(server) > before

    wait_until(is_full, 60, "records to be dropped")


def test_a_log_that_nobody_reads_stops_nobody_and_says_what_it_lacks(
    server: Served, reader: LogReader
) -> None:
    with reader.paused():
        for _ in range(60):
            server.stream_of(1000).close()
        assert answers(server)
        fill_log(server)
        assert answers(server)
    wait_until(lambda: "records of the log were dropped" in reader.text, 60, "the log to say so")
    assert answers(server)


def test_one_signal_shows_the_stacks_of_all_processes_and_the_schedulers_state(
    server: Served, reader: LogReader
) -> None:
    reader.hold_more()
    begin = len(reader.text)
    stream = server.stream_of(60000)
    for pid in server.processes:
        os.kill(pid, signal.SIGUSR2)
    server.process.send_signal(signal.SIGUSR1)
    names = ("the engine's process", "the worker of instance 0", "the worker of instance 1", "an API process")
    shown = [f"the threads of {name}" for name in names]
    shown += ["the scheduler's state: 0 waiting, 1 running; 1 batches", "running: cmpl-"]
    shown += ["BatchLoop.turn", "Worker.serve", "Runner.run"]
    wait_until(lambda: all(one in reader.text[begin:] for one in shown), 60, f"{shown} in {reader.text}")
    wait_until(lambda: reader.text[begin:].count("the threads of an API process") == 2, 60, "both")
    stream.close()
    assert answers(server)


def test_a_signal_to_all_processes_lets_open_requests_finish_with_no_stream_and_in_a_folder_of_any_name(
    tmp_path: Path,
) -> None:
    with (
        tempfile.TemporaryDirectory(suffix="\udcff") as folder,  # ends in a byte that is no UTF-8
        served(
            tmp_path,
            *("--num-instances", "2", "--api-server-count", "2"),
            redirections="<&- >&- 2>&-",
            environment={"TMPDIR": folder, "LC_ALL": "C"},
        ) as server,
    ):
        server.stream_of(60000).close()
        wait_until(lambda: server.metric("loong:instance_kv_tokens") == 0, 60, "the KV to be free")
        processes = server.processes
        stream = server.stream_of(400)
        assert [*Path(folder).iterdir()]
        for pid in processes:
            os.kill(pid, signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert server.process.wait(60) == 0
        assert_gone(processes)
        assert not [*Path(folder).iterdir()]
        with bound_socket(*server.address):
            pass  # the port is free


def test_a_signal_to_all_processes_ends_a_start_cleanly(tmp_path: Path) -> None:
    words = ("serve", "--port", str(free_port()), "--num-instances", "2")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", ENTRY, *words], stderr=log, env=os.environ)
    wait_until(lambda: len(forked_of(process.pid)) == 2, 60, "workers to be started")
    processes = [*forked_of(process.pid), *fork_servers_of(process.pid), process.pid]
    for pid in processes:
        os.kill(pid, signal.SIGTERM)
    assert process.wait(60) == 130
    assert_gone(processes)
    *_, last = (tmp_path / "log").read_text().splitlines()
    assert last.endswith("stopping at once; the server was not up yet")


def test_an_interrupt_just_before_workers_start_leaves_nothing(tmp_path: Path) -> None:
    words, log = ("serve", "--port", str(free_port()), "--num-instances", "2"), tmp_path / "log"
    with tempfile.TemporaryDirectory() as folder:  # `tmp_path` is too long for sockets
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", ENTRY, *words], stderr=stderr, env={**os.environ, "TMPDIR": folder}
            )
        wait_until(lambda: "tool calls are read" in log.read_text(), 60, "a part of the start")
        processes = [*fork_servers_of(process.pid), process.pid]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
        assert_gone(processes)
        assert not [*Path(folder).iterdir()]
