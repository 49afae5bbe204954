"""Files that are read, and files that cannot be."""

import logging
from pathlib import Path

import pytest
from decision_logs import logged
from plans import in_group
from simulation import instances_with, timed_request

from loong.core.errors import ConfigError
from loong.observability.decision_log import lines
from loong.observability.decision_log.log import decision_log
from loong.observability.decision_log.reader import read_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the log of a small run."""
    path = tmp_path / "log.jsonl"
    logged(path, in_group(0), instances_with([50]), [timed_request(0, 6, 3)])
    return path


def test_of_several_runs_the_last_is_read(path: Path) -> None:
    path.write_bytes(b"damaged by an earlier version\n" + path.read_bytes() + b'{"line":"pla')
    with decision_log(path):
        pass
    assert read_log(path) == (lines.StartedLine(lines.VERSION),)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (b"{", "truncated"),
        (b'{"line":"nothing"}', "nothing"),
        (b'{"line":"first_token","time":"soon","request_id":"r"}', "time"),
        (b'{"line":"first_token","time":1,"request_id":"r","more":1}', "more"),
        (b'{"line":"first_token","time":1e308,"request_id":"r"}', "time"),
        (b'{"line":"first_token","time":-1e308,"request_id":"r"}', "time"),
        (b'{"line":"first_token","time":1,"request_id":"\xff"}', "utf-8"),
        (b"", "truncated"),
        (b'{"a":' * 100_000, "recursion"),
    ],
)
def test_a_damaged_line_is_named(path: Path, damage: bytes, said: str) -> None:
    written = path.read_bytes().split(b"\n")
    written[2] = damage
    path.write_bytes(b"\n".join(written))
    with pytest.raises(ConfigError, match=rf"log\.jsonl:3 is damaged: .*(?i:{said})"):
        read_log(path)


def test_a_line_that_is_still_being_written_is_left_out(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = read_log(path)
    path.write_bytes(path.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        assert read_log(path) == whole[:-1]
    assert f"{path}:{len(whole)} is not complete" in caplog.text


def test_other_versions_are_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"line":"started","version":99}\n')
    with pytest.raises(ConfigError, match="log:1 begins version 99, but this loong reads 6"):
        read_log(path)


@pytest.mark.parametrize(("content", "said"), [(b"", "empty"), (b"hello\n", "not a decision log")])
def test_what_is_no_log_is_said_to_be_none(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path} is {said}"):
        read_log(path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent: No such file"):
        read_log(tmp_path / "absent")
