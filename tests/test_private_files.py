"""Files with prompts, outputs, or who asked when are for their user alone."""

import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from loong.observability.decision_log.line_file import LineFile
from loong.observability.worker_traces import join_traces
from loong.private_files import write_private
from loong.runs.outputs import make_folder
from loong.runs.run_document import write_document
from loong.runs.spawned_server import process_group


@pytest.fixture(autouse=True)
def open_to_all() -> Iterator[None]:
    """Let a file that says nothing of its mode be for all."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_lines(path: Path) -> None:
    file = LineFile(path)
    file.append(b"line")
    file.close()


def write_trace(path: Path) -> None:
    events = path.with_name("events")
    events.write_text('{"traceEvents": []}')
    join_traces({(0, 0): events}, path)


def write_log(path: Path) -> None:
    with process_group(["true"], path) as process:
        process.wait()


def write_run(path: Path) -> None:
    write_document(path.parent, {}, [])
    (path.parent / "results.json").rename(path)


WRITERS: list[Callable[[Path], object]] = [
    write_lines,
    write_trace,
    write_log,
    write_run,
    partial(write_private, data="text"),
]


@pytest.mark.parametrize("write", WRITERS)
def test_a_new_file_is_for_its_user_alone(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "file")
    assert mode_of(tmp_path / "file") == 0o600


def test_a_file_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(0o640)
    for write in (write_lines, write_log, partial(write_private, data=b"bytes")):
        write(path)
        assert mode_of(path) == 0o640


def test_a_new_folder_is_for_its_user_alone(tmp_path: Path) -> None:
    make_folder("--output-dir", tmp_path / "runs" / "one")
    assert mode_of(tmp_path / "runs" / "one") == 0o700
    (tmp_path / "shared").mkdir(0o755)
    make_folder("--output-dir", tmp_path / "shared")
    assert mode_of(tmp_path / "shared") == 0o755
