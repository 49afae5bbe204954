"""A server that cannot start says why in one line, ends with a code, and leaves nothing behind."""

import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from child_processes import children_of

from loong.launcher.cli import main
from loong.model.tiny import tiny_model

SMALL = ("--num-instances", "1", "--kv-cache-tokens", "64", "--port", "0")


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def model(good_model: Path, tmp_path: Path) -> Path:
    """Return a folder to damage."""
    return Path(shutil.copytree(good_model, tmp_path / "model"))


@pytest.fixture(autouse=True)
def _leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No run directory and no process is there afterwards that was not before."""
    with tempfile.TemporaryDirectory() as folder:  # of a short name, for there will be sockets in it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = children_of(os.getpid())
        handlers = logging.root.handlers[:]
        yield
        logging.root.handlers[:] = handlers  # what `serve` logs to is closed after this test
        assert children_of(os.getpid()) == before
        assert not [*Path(folder).iterdir()]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * 1000)


def without_a_tensor_shape(path: Path) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", Path.unlink),
        ("config.json", garbage),
        ("tokenizer.json", Path.unlink),
        ("tokenizer.json", garbage),
        ("tokenizer_config.json", garbage),
        ("model.safetensors", Path.unlink),
        ("model.safetensors", truncated),
        ("model.safetensors", garbage),
        ("config.json", without_a_tensor_shape),
    ],
)
def test_a_damaged_model_is_named(
    model: Path, name: str, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    damage(model / name)
    message = error_of(capfd, str(model))
    assert str(model) in message or name in message or "tensor model.layers.0." in message


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% if %}", "does not compile: "),
        ("{{ messages | nonsense }}", "does not compile: "),
        ("{{ 9999 ** 9999 ** 9999 }}", "does not compile: it takes more than 5 s"),
        ("{{ messages[0].content.ljust(10**10) }}", "cannot be used: it takes too much memory"),
        ("a" * 2**18, "has 131073 bytes or more, but at most 131072 are allowed"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_named(
    model: Path, source: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (model / "chat_template.jinja").write_text(source)
    assert f"the model's chat template {why}" in error_of(capfd, str(model))


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("no/such/folder",), "no/such/folder"),
        (("--kv-cache-tokens", "100g"), "--kv-cache-tokens"),
        (("--max-model-len", "1m", "--kv-cache-tokens", "64"), "--max-model-len"),
        (("--host", "no.such.host.invalid"), "--host"),
        (("--host", "203.0.113.1"), "--host"),
        (("--cost-model", "no/such/file.json"), "no/such/file.json"),
        (("--decision-log", "no/such/folder/log"), "no/such/folder/log"),
        (("--event-log", "/dev/full/log", "--event-log-prompts"), "/dev/full/log"),
        (("--device", "cuda"), "cuda"),
    ],
)
def test_a_flag_that_cannot_work_is_named(
    flags: tuple[str, ...], what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert what.lower() in error_of(capfd, *flags).lower()


def test_a_port_in_use_is_named_before_anything_is_loaded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"--port {port}: the port is in use" in error_of(capfd, str(tmp_path), "--port", port)


def test_a_model_that_is_not_there_is_named_before_a_port_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert "no/such/folder" in error_of(capfd, "no/such/folder", "--port", port)


def error_of(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the one line that `loong serve` ends with."""
    try:
        code = main(["serve", *SMALL, *flags])
    except SystemExit as end:  # argparse's way
        code = int(end.code or 0)
    assert code in (1, 2)
    output = capfd.readouterr().err
    assert "Traceback" not in output, output
    *_, last = output.splitlines()
    assert last.startswith(("loong: error: ", "loong serve: error: ")), output
    return last
