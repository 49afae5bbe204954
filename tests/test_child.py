"""What the processes of a server are given, and which signals do not end them."""

import signal
from dataclasses import dataclass
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from loong.child import config_line, config_of
from loong.launcher.serve.child_processes import ChildProcess, signal_children

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


async def test_signals_from_its_first_moment_on_do_not_end_a_process() -> None:
    child = ChildProcess("exits", {"code": 3}, environment={"PYTHONPATH": str(SUPPORT)})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal_children(number)
    assert await child.wait() == child.returncode == 3
    child.send_signal(signal.SIGKILL)  # which finds nobody


async def test_a_process_is_killed_when_reported_so() -> None:
    child = ChildProcess("exits", {"code": None}, environment={"PYTHONPATH": str(SUPPORT)})
    child.kill()
    assert await child.wait() == -signal.SIGKILL
