"""Where a command is to write is tried before it works."""

from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.launcher.cli import main
from loong.runs.outputs import check_file, make_folder, sole_writer

NO_PROCESS = "/proc/none"


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("before")
    check_file("--output", tmp_path / "there")
    check_file("--output", tmp_path / "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    for _ in range(2):
        make_folder("--output-dir", tmp_path / "above" / "below")
    assert not list((tmp_path / "above" / "below").iterdir())


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--output {tmp_path} is a folder"):
        check_file("--output", tmp_path)


def test_a_folder_that_takes_no_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="--output-dir /proc cannot be written"):
        make_folder("--output-dir", Path("/proc"))


def test_one_process_at_a_time_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cost-model.json"
    said = f"--output {path} is being written by another process"
    with sole_writer("--output", path), pytest.raises(ConfigError, match=said), sole_writer("--output", path):
        pass
    with sole_writer("--output", path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["profile", "--output", "/dev/null/c.json"],
            "--output /dev/null/c.json",
        ),
        (["profile", "--output", f"{NO_PROCESS}/c.json"], f"--output {NO_PROCESS}/c.json cannot be written"),
        (
            ["simulate", "--rate", "1", "--output-dir", NO_PROCESS],
            f"--output-dir {NO_PROCESS} cannot be",
        ),
        (["serve", "--trace-dir", NO_PROCESS], f"--trace-dir {NO_PROCESS} cannot be made: No such"),
    ],
)
def test_a_command_that_could_not_write_does_not_begin(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert not output.out
    (line,) = output.err.splitlines()
    assert complaint in line
