"""The inputs of a server's processes, and signals that do not end them."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from child_processes import parent_of
from hypothesis import given
from hypothesis import strategies as st
from raw_http import until

from loong.child import config_line, config_of
from loong.launcher.serve.child_processes import ForkServer, signal_children

SUPPORT = Path(__file__).parent / "support"
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
    with closing(ForkServer("exits", {"PYTHONPATH": str(SUPPORT)})) as server:
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


async def test_the_end_of_a_fork_server_ends_what_it_forked_and_all_that_is_started_later(
    fork_server: ForkServer,
) -> None:
    assert await fork_server.start({"code": 0}).wait() == 0
    child = fork_server.start({"code": None})
    await until(lambda: child.pid is not None)
    assert child.pid is not None
    os.kill(parent_of(child.pid), signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    await until(lambda: not Path(f"/proc/{child.pid}").exists())
    assert await fork_server.start({"code": 0}).wait() == -signal.SIGKILL


async def test_a_module_that_cannot_be_imported_ends_all_that_is_started(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with closing(ForkServer("loong.no_such_module", {})) as server:
        children = [server.start({}) for _ in range(3)]
        assert [await child.wait() for child in children] == [1, 1, 1]
    assert "No module named 'loong.no_such_module'" in capfd.readouterr().err
