"""Processes of a server that are stopped for longer than the longest silence of a worker."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from served import HASTY_ENTRY, HASTY_HEARTBEAT, Served, assert_gone, served, wait_until

from loong.executor.heartbeats import MAX_MISSED

MAX_SILENCE = MAX_MISSED * HASTY_HEARTBEAT  # seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("pauses"), "--num-instances", "2", entry=HASTY_ENTRY) as running:
        yield running


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Stop processes one after the other; at the end, let the first go on first."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda pid=pid: is_stopped(pid), 60, "a process to stop")  # type: ignore[misc]
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # it was given up
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("kind", ["the engine", "all"])
def test_a_pause_loses_no_worker_and_no_request(server: Served, kind: str) -> None:
    workers = server.worker_pids()
    stream = server.stream_of(200)
    with stopped([server.process.pid, *(workers if kind == "all" else ())]):
        time.sleep(1.5 * MAX_SILENCE)  # the pause itself: nothing else is waited for
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    next(server.stream_of(5))
    assert server.worker_pids() == workers


def test_a_worker_that_stops_is_replaced_and_never_goes_on(server: Served) -> None:
    workers = server.worker_pids()
    stream = server.stream_of(300)
    with stopped(workers[1:]):
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        wait_until(lambda: is_gone(workers[1]), 60, "the stopped worker to be killed")
    reason = f"instance 1 was lost: it was silent for {MAX_SILENCE:g} s"
    wait_until(lambda: reason in server.log, 60, "the loss to be logged")
    wait_until(lambda: server.metric("loong:instance_joins_total") >= 1, 60, "another to join")
    assert_gone(workers[1:])
