import http.client
import os
import signal
import socket
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.runs import spawned_server
from loong.runs.spawned_server import ServerConfig, spawn_server
from loong.workloads.errors import ServerUnusableError

pytestmark = pytest.mark.usefixtures("stub_server")


def config(*extra_arguments: str, start_timeout: float = 60.0) -> ServerConfig:
    return ServerConfig(None, 2, 1, extra_arguments, start_timeout)


class Held:
    """A FIFO that a server and its children hold open: its end is theirs."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "held"
        os.mkfifo(self.path)
        self._reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def is_held(self) -> bool:
        try:
            return os.read(self._reader, 1) != b""
        except BlockingIOError:
            return True

    def wait_until_free(self) -> None:
        os.set_blocking(self._reader, True)
        assert os.read(self._reader, 1) == b""
        os.close(self._reader)


def status_of(base_url: str, path: str) -> int:
    connection = http.client.HTTPConnection(base_url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("flags", [(), ("--ignore-sigterm",)])
def test_a_server_is_healthy_inside_and_gone_with_its_children_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    if flags:
        monkeypatch.setattr(spawned_server, "STOP_SECONDS", 0.1)
    held = Held(tmp_path)
    with spawn_server(config(*flags, "--hold", str(held.path)), "esp", tmp_path / "log") as base_url:
        assert status_of(base_url, "/health") == 200
        assert held.is_held()
    held.wait_until_free()


def test_a_failure_inside_stops_the_server_too(tmp_path: Path) -> None:
    held = Held(tmp_path)
    with (
        pytest.raises(KeyboardInterrupt),
        spawn_server(config("--hold", str(held.path)), "esp", tmp_path / "log"),
    ):
        raise KeyboardInterrupt
    held.wait_until_free()


def test_a_sigterm_to_us_stops_the_server_too(tmp_path: Path) -> None:
    held = Held(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(SystemExit) as ending,
        spawn_server(config("--hold", str(held.path)), "esp", tmp_path / "log"),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ending.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    held.wait_until_free()


def test_a_server_that_dies_shows_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_FAIL_TO_START_AS", "esp")
    with (
        pytest.raises(
            ServerUnusableError, match=r"(?s)loong serve --policy esp.*status 1.*no such model: stub"
        ),
        spawn_server(config(), "esp", tmp_path / "log"),
    ):
        pass


def test_a_server_that_is_never_healthy_is_given_up_and_stopped(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerUnusableError, match=r"not healthy within 0\.5 s"),
        spawn_server(config("--never-healthy", start_timeout=0.5), "esp", tmp_path / "log"),
    ):
        pass


def test_a_port_that_was_taken_meanwhile_is_tried_again_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        free_port = spawned_server.free_port
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(spawned_server, "free_port", lambda: next(ports))
        with spawn_server(config(), "esp", tmp_path / "log") as base_url:
            assert status_of(base_url, "/health") == 200


def test_the_arguments_are_what_a_user_would_type() -> None:
    arguments = ServerConfig("my/model", 4, 2, ("--dtype", "float32"), 1.0).arguments("static-sp")
    assert " ".join(arguments) == (
        "serve my/model --policy static-sp --num-instances 4 --tensor-parallel-size 2 --dtype float32"
    )


@pytest.mark.parametrize(
    ("sizes", "flag"), [((0, 1), "--num-instances 0"), ((1, 0), "--tensor-parallel-size 0")]
)
def test_sizes_below_one_are_named(sizes: tuple[int, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        ServerConfig(None, *sizes, (), 1.0)
