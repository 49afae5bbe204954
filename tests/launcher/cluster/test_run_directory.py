"""Run directories: private, locked while their server lives, and removed with nothing else."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from loong.core.errors import ConfigError
from loong.launcher.cluster.run_directory import run_directory

KILLED = """
import os, signal
from loong.launcher.cluster.run_directory import run_directory

with run_directory() as directory:
    print(directory.path, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files. `tmp_path` is too long for sockets."""
    with TemporaryDirectory() as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def left_behind(folder: Path) -> Path:
    """Return the run directory of a server that was killed."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    ended = subprocess.run(
        [sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    return Path(ended.stdout.decode().strip())


def use(path: Path) -> None:
    """Make what a server makes in its run directory."""
    for name in ("reports", "3.sock"):
        with closing(socket.socket(socket.AF_UNIX)) as listener, pytest.MonkeyPatch.context() as patch:
            patch.chdir(path)  # a shorter path
            listener.bind(name)
    (path / "join.lock").touch()
    (path / "counter_12.db").write_bytes(b"0")


def test_a_run_directory_is_private_and_goes_with_all_that_its_server_made(folder: Path) -> None:
    with run_directory() as directory:
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert directory.trouble == ""
        use(directory.path)
    assert not [*folder.iterdir()]


def test_a_start_removes_what_a_killed_server_left(folder: Path) -> None:
    path = left_behind(folder)
    use(path)
    with run_directory() as directory:
        assert [*folder.iterdir()] == [directory.path]


def without_marker(path: Path) -> None:
    (path / "made-by-loong").unlink()


def of_another_boot(path: Path) -> None:
    (path / "made-by-loong").write_text("a run directory of loong, boot 0000\n")


def open_to_others(path: Path) -> None:
    path.chmod(0o755)


def with_a_link_as_marker(path: Path) -> None:
    (path / "made-by-loong").rename(path.parent / "elsewhere")
    (path / "made-by-loong").symlink_to(path.parent / "elsewhere")


def with_a_pipe_as_marker(path: Path) -> None:
    (path / "made-by-loong").unlink()
    os.mkfifo(path / "made-by-loong")


@pytest.mark.parametrize(
    "spoil",
    [
        without_marker,
        of_another_boot,
        open_to_others,
        with_a_link_as_marker,
        with_a_pipe_as_marker,
    ],
)
def test_what_is_not_certainly_a_leftover_stays(folder: Path, spoil: Callable[[Path], None]) -> None:
    path = left_behind(folder)
    use(path)
    spoil(path)
    before = sorted(path.iterdir())
    with run_directory():
        pass
    assert sorted(path.iterdir()) == before


def test_what_another_user_left_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, user = left_behind(folder), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with run_directory():
        assert path.exists()


def test_the_directory_of_a_server_that_lives_stays_though_its_process_cannot_be_seen(folder: Path) -> None:
    path = left_behind(folder)
    use(path)
    locked = os.open(path, os.O_RDONLY)
    fcntl.flock(locked, fcntl.LOCK_EX)  # as a server in another pid namespace holds it
    with run_directory():
        assert len([*path.iterdir()]) == 5
    os.close(locked)
    with run_directory():
        assert not path.exists()


def test_files_of_the_user_stay_whatever_their_folder_is_called(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("loong-2024-results", "loong-run-2024", "loong-run-mine", "loong-1-x"):
        (folder / name / "deep").mkdir(parents=True)
        (folder / name / "deep" / "result").write_text("42")
    (folder / "loong-run-file").write_text("42")
    (folder / "loong-run-link").symlink_to(folder / "loong-run-mine")
    path = left_behind(folder)
    (path / "notes.txt").write_text("42")
    (path / "more").mkdir()
    with run_directory():
        pass
    assert len([*folder.glob("*/deep/result")]) == 5  # one by a link
    assert sorted(path.iterdir()) == [path / "more", path / "notes.txt"]
    assert "because of notes.txt in it" in caplog.text


def test_a_folder_of_many_levels_does_not_keep_a_server_from_starting(folder: Path) -> None:
    path, before = left_behind(folder), Path.cwd()
    os.chdir(path)
    try:
        for _ in range(1500):
            Path("d").mkdir()
            os.chdir("d")
    finally:
        os.chdir(before)
    with run_directory() as directory:
        assert directory.path.exists()
    subprocess.run(["rm", "-rf", str(path)], check=True)  # which Python cannot


def test_a_directory_that_is_gone_is_a_trouble_and_one_that_took_its_name_stays(folder: Path) -> None:
    with run_directory() as directory:
        directory.path.rename(folder / "moved")
        assert "is gone" in directory.trouble
        directory.path.mkdir()
        assert "is gone" in directory.trouble
    assert directory.path.exists()


def test_a_folder_too_deep_for_sockets_is_named_and_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="107 are the most; set TMPDIR to a shorter one"), run_directory():
        pass
    assert not [*deep.iterdir()]
