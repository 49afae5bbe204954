"""The inputs of a server's processes, and signals that do not end them."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from child_processes import command_of, fork_servers_of
from hypothesis import given
from hypothesis import strategies as st
from raw_http import until

from loong.processes.child import config_line, config_of
from loong.processes.child_processes import FORK_SERVER_LOST, signal_children
from loong.processes.fork_server import ForkServer

TESTS = Path(__file__).parents[1]
PATH = os.pathsep.join(map(str, (TESTS / "support", TESTS.parent)))
PATHS = st.binary().map(lambda name: name.decode(errors="surrogateescape"))


@dataclass(frozen=True)
class Config:
    """Some of each kind."""

    path: str
    sizes: tuple[int, ...]
    seconds: float
    name: str | None


@given(st.builds(Config, PATHS, seconds=st.floats(allow_nan=False)))
def test_a_config_arrives_as_it_was_sent_with_paths_of_any_bytes(config: Config) -> None:
    line = config_line(config)
    assert line.count(b"\n") == 1
    assert config_of(line, Config) == config


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    with closing(ForkServer("exits", {"PYTHONPATH": PATH})) as server:
        yield server


async def test_signals_from_its_first_moment_on_do_not_end_a_process(fork_server: ForkServer) -> None:
    child = fork_server.start({"code": 3})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal_children(number)
    assert await child.wait() == child.returncode == 3
    child.send_signal(signal.SIGKILL)  # which finds no process


@pytest.mark.parametrize("is_forked", [False, True])
async def test_a_process_is_killed_when_reported_so(fork_server: ForkServer, is_forked: bool) -> None:
    if is_forked:
        assert await fork_server.start({"code": 0}).wait() == 0
    child = fork_server.start({"code": None})
    child.kill()
    assert await child.wait() == -signal.SIGKILL


async def test_each_process_has_its_own_config_session_and_end(fork_server: ForkServer) -> None:
    children = [fork_server.start({"code": code}) for code in range(20)]
    staying = fork_server.start({"code": None})
    assert await asyncio.gather(*(child.wait() for child in children)) == [*range(20)]
    assert len({child.pid for child in children}) == 20
    await until(lambda: staying.pid is not None and os.getsid(staying.pid) == staying.pid)
    fork_server.kill([staying])
    assert await staying.wait() == -signal.SIGKILL


def _own_servers() -> list[int]:
    """Return the fork servers of this process but those of other tests."""
    return [pid for pid in fork_servers_of(os.getpid()) if command_of(pid).endswith("exits ")]


def _has_said(caplog: pytest.LogCaptureFixture, num_lines: int) -> bool:
    return len(caplog.messages) == num_lines


async def test_what_a_fork_server_forked_goes_on_after_its_end_and_another_takes_its_place(
    fork_server: ForkServer, caplog: pytest.LogCaptureFixture
) -> None:
    child = fork_server.start({"code": None})
    await until(lambda: child.pid is not None)
    for number in range(1, 4):  # the second one has forked none yet
        await until(lambda: len(_own_servers()) == 1)
        os.kill(_own_servers()[0], signal.SIGKILL)
        await until(partial(_has_said, caplog, number))
        if number != 2:
            assert await fork_server.start({"code": number}).wait() == number
    child.send_signal(signal.SIGCONT)
    assert child.returncode is None
    child.kill()
    assert await child.wait() == -signal.SIGKILL
    assert all("was killed by signal 9; what it forked goes on" in line for line in caplog.messages)


async def test_a_process_that_a_fork_server_is_still_to_fork_is_reported_as_not_started() -> None:
    with closing(ForkServer("exits", {"PYTHONPATH": PATH})) as fork_server:
        child = fork_server.start({"code": 0})
        fork_server.kill([])  # it imports
        assert await child.wait() == FORK_SERVER_LOST
        assert await fork_server.start({"code": 5}).wait() == 5


async def test_what_still_runs_ends_when_its_fork_server_is_closed(fork_server: ForkServer) -> None:
    child = fork_server.start({"code": None})
    await until(lambda: child.pid is not None)
    fork_server.close()
    assert await child.wait() == 0


async def test_a_module_that_cannot_be_imported_ends_all_that_is_started(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(ForkServer("loong.no_such_module", {})) as server:
        children = [server.start({}) for _ in range(3)]
        assert [await child.wait() for child in children] == [1, 1, 1]
    assert "No module named 'loong.no_such_module'" in capfd.readouterr().err
