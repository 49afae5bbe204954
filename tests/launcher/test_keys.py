"""Keys come from the environment, from files or the command line, and are never reported."""

import argparse
import logging
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.launcher.cli import build_parser, main
from loong.launcher.config_file import apply_config_file
from loong.launcher.keys import admin_key, key_of_client, keys_in, keys_of_server
from loong.launcher.serve.command import warn_of_strangers

CLIENTS = ("chat", "bench", "chaos")
OPERATORS = ("serve", "scale", "chaos")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOONG_API_KEY", "OPENAI_API_KEY", "LOONG_ADMIN_API_KEY"):
        monkeypatch.delenv(variable, raising=False)


def flags(*words: str) -> argparse.Namespace:
    parser, _ = build_parser(words[:1])
    return parser.parse_args(words)


def file_of(folder: Path, content: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path


def test_a_server_takes_every_key_of_its_file_and_those_typed(tmp_path: Path) -> None:
    path = file_of(tmp_path, "first\r\n\n  second \nthird\nfirst")
    args = flags("serve", "--api-key-file", str(path), "--api-key", "typed", "--api-key", "second")
    assert keys_of_server(args) == ("typed", "second", "first", "third")


def test_a_server_takes_the_key_of_the_environment_if_no_other_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert keys_of_server(flags("serve")) == ()
    monkeypatch.setenv("LOONG_API_KEY", " of the environment\n")
    assert keys_of_server(flags("serve")) == ("of the environment",)
    assert keys_of_server(flags("serve", "--api-key", "typed")) == ("typed",)
    monkeypatch.setenv("OPENAI_API_KEY", "of a client")
    monkeypatch.delenv("LOONG_API_KEY")
    assert keys_of_server(flags("serve")) == ()


@pytest.mark.parametrize("command", CLIENTS)
def test_a_client_sends_one_key(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(tmp_path, "first\nsecond\n")
    assert key_of_client(flags(command)) is None
    monkeypatch.setenv("OPENAI_API_KEY", "of OpenAI")
    assert key_of_client(flags(command)) == "of OpenAI"
    monkeypatch.setenv("LOONG_API_KEY", "")  # a client without a key is refused, which is no danger
    assert key_of_client(flags(command)) == "of OpenAI"
    monkeypatch.setenv("LOONG_API_KEY", "of loong")
    assert key_of_client(flags(command)) == "of loong"
    assert key_of_client(flags(command, "--api-key-file", str(path))) == "first"
    assert key_of_client(flags(command, "--api-key", "typed")) == "typed"
    with pytest.raises(ConfigError, match="--api-key and --api-key-file are two keys"):
        key_of_client(flags(command, "--api-key", "typed", "--api-key-file", str(path)))


@pytest.mark.parametrize("command", OPERATORS)
def test_there_is_one_admin_key(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert admin_key(flags(command)) is None
    monkeypatch.setenv("LOONG_ADMIN_API_KEY", "of the environment")
    assert admin_key(flags(command)) == "of the environment"
    path = str(file_of(tmp_path, "of the file\n"))
    assert admin_key(flags(command, "--admin-key-file", path)) == "of the file"
    assert admin_key(flags(command, "--admin-key", "typed")) == "typed"
    with pytest.raises(ConfigError, match="--admin-key and --admin-key-file are two keys"):
        admin_key(flags(command, "--admin-key", "typed", "--admin-key-file", path))
    file_of(tmp_path, "one\ntwo\n")
    with pytest.raises(ConfigError, match="has 2 keys, but one is needed"):
        admin_key(flags(command, "--admin-key-file", path))


@pytest.mark.parametrize("value", ["", "  ", "\n"])
def test_a_variable_that_is_set_and_empty_does_not_open_a_server(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("LOONG_API_KEY", value)
    with pytest.raises(ConfigError, match=r"\$LOONG_API_KEY is empty"):
        keys_of_server(flags("serve"))
    monkeypatch.setenv("LOONG_ADMIN_API_KEY", value)
    with pytest.raises(ConfigError, match=r"\$LOONG_ADMIN_API_KEY is empty"):
        admin_key(flags("serve"))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is empty; write one key a line"),
        ("\n \r\n", "is empty; write one key a line"),
        ("good\nclé\n", "line 2 of --api-key-file .* has characters that no header can hold"),
        (b"\xff\xfe", "line 1 of --api-key-file .* has characters that no header can hold"),
        ("a\0b", "line 1 of --api-key-file .* has characters that no header can hold"),
        ("k" * (1 << 20) + "k", "has more than 1048576 bytes"),
    ],
)
def test_a_file_that_has_no_keys_is_refused_by_name(tmp_path: Path, content: str | bytes, why: str) -> None:
    path = file_of(tmp_path, content)
    with pytest.raises(ConfigError, match=why) as refused:
        keys_in("--api-key-file", path)
    assert str(path) in str(refused.value)
    assert "clé" not in str(refused.value)


@pytest.mark.parametrize("command", ["chat", "chaos", "scale", "serve"])
def test_a_file_that_is_not_there_ends_the_command(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = "--admin-key-file" if command == "scale" else "--api-key-file"
    words = {"chaos": ["--kill", "1/1s"], "serve": ["--port", "0"]}.get(command, [])
    for path, why in ((tmp_path / "nothing", "No such file or directory"), (tmp_path, "Is a directory")):
        assert main([command, *words, flag, str(path)]) == 1
        assert f"loong: error: {flag} {path} cannot be read: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "is_warned"), [(0o600, False), (0o640, False), (0o644, True), (0o604, True)]
)
def test_a_file_that_all_users_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    path = file_of(tmp_path, "secret", mode)
    with caplog.at_level(logging.WARNING):
        assert keys_in("--api-key-file", path) == ("secret",)
    assert (f"--api-key-file {path} has keys, and all users can read it" in caplog.text) == is_warned
    assert "secret" not in caplog.text


def test_typed_keys_that_no_header_can_hold_are_refused_and_not_reported() -> None:
    for key in ("clé", "a\nb", ""):
        with pytest.raises(ConfigError, match="--api-key") as refused:
            key_of_client(flags("chat", "--api-key", key))
        assert not key or key not in str(refused.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-7.example"])
def test_a_server_for_others_without_a_key_is_warned_of(caplog: pytest.LogCaptureFixture, host: str) -> None:
    warn_of_strangers(flags("serve", "--host", host), ("key",))
    for at_home in ("127.0.0.1", "::1", "localhost"):
        warn_of_strangers(flags("serve", "--host", at_home), ())
    assert not caplog.text
    warn_of_strangers(flags("serve", "--host", host), ())
    assert f"--host {host} without an API key: all who reach it may use this server" in caplog.text


def test_a_config_with_keys_that_all_users_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tmp_path / "serve.yaml"
    for key, is_secret in (("port: 8001", False), ("api-key: [secret]", True), ("admin-key: secret", True)):
        config.write_text(f"{key}\n")
        for mode in (0o600, 0o644):
            config.chmod(mode)
            caplog.clear()
            parser, commands = build_parser(["serve"])
            apply_config_file(commands["serve"], ["serve", "--config", str(config)])
            warn_of_strangers(parser.parse_args(["serve", "--config", str(config)]), ("secret",))
            assert (f"--config {config} has keys" in caplog.text) == (is_secret and mode == 0o644)
            assert "secret" not in caplog.text.replace(str(config), "")
