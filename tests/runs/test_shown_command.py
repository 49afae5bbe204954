"""No key is in a command line that is shown."""

import shlex

import pytest

from loong.runs.shown_command import shown_command


@pytest.mark.parametrize(
    "words",
    [
        ("loong", "serve", "--api-key", "sk-secret", "--port", "1"),
        ("loong", "serve", "--admin_key", "sk-secret", "--port", "1"),
        ("loong", "serve", "--api-key=sk-secret", "--port", "1"),
        ("loong", "serve", "--api-key", "sk-secret with 'spaces'", "--port", "1"),
        ("loong", "bench", "--extra-server-args=--api-key sk-secret --port 1"),
        ("loong", "bench", "--extra-server-args=--admin-key=sk-secret --port 1"),
        ("loong", "bench", "--extra-server-args=--api_key 'sk-secret with spaces' --port 1"),
        ("loong", "bench", "--extra-server-args", "--api-key sk-secret --port 1"),
        ("loong", "bench", "--extra-server-args=--api-key 'sk-secret", "--port 1"),
    ],
)
def test_a_command_line_is_shown_without_its_keys(words: tuple[str, ...]) -> None:
    shown = shown_command(words)
    assert "secret" not in shown
    assert "--port 1" in shown.replace("'", "")


def test_a_command_line_without_keys_is_shown_as_it_is() -> None:
    words = ("loong", "bench", "--api-key-file", "a file", "--extra-server-args=--max-model-len 32k")
    assert shlex.split(shown_command(words)) == list(words)
