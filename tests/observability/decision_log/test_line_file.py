"""A file of lines never fails who writes to it."""

import logging
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.observability.decision_log.line_file import MAX_BUFFERED_BYTES, LineFile


def test_lines_are_written_many_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    file.append(b"a")
    assert path.read_bytes() == b""
    file.append(b"b" * MAX_BUFFERED_BYTES)
    assert path.read_bytes() == b"a\n" + b"b" * MAX_BUFFERED_BYTES + b"\n"
    file.append(b"c")
    file.close()
    assert path.read_bytes().endswith(b"b\nc\n")


def test_a_full_disk_is_reported_once_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    file = LineFile(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            file.append(b"a")
            file.flush()
        file.close()
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full ends here: No space left on device"
    ]


@pytest.mark.parametrize(("name", "said"), [("absent/file", "No such file"), ("", "Is a directory")])
def test_what_cannot_be_opened_is_an_error_at_once(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot write .*{said}"):
        LineFile(tmp_path / name)
