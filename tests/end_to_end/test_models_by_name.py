"""Models by other names than that of a folder, served as users serve them."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from gguf_files import write_gguf
from openai.types.chat import ChatCompletionMessageParam
from served import Served, served
from small_hub import SmallHub, small_hub

from loong.launcher.cli import main
from loong.model.tiny import tiny_model
from loong.runs.spawned_server import ENTRY

ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is it?"}]


def answer(server: Served, model: str) -> str:
    """Return a greedy answer, which streamed is the same."""
    client = server.client.chat.completions
    reported = client.create(model=model, messages=ASKED, max_tokens=12, temperature=0)
    pieces = client.create(model=model, messages=ASKED, max_tokens=12, temperature=0, stream=True)
    text = reported.choices[0].message.content or ""
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    return text


def test_a_gguf_file_is_served(tmp_path: Path) -> None:
    path, _ = write_gguf("llama-tied", tmp_path, "Q8_0")
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with served(tmp_path, str(path), "--num-instances", "2", environment=cache) as server:
        assert answer(server, "llama-tied-Q8_0")


def test_a_model_of_the_hub_is_served_by_its_name(tmp_path: Path) -> None:
    with small_hub(SmallHub({"org/model": tiny_model(tmp_path)})) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        with served(tmp_path, "org/model", "--num-instances", "1", environment=environment) as server:
            first = answer(server, "org/model")
    environment["HF_HUB_OFFLINE"] = "1"
    with served(tmp_path, "org/model", "--num-instances", "2", environment=environment) as server:
        assert answer(server, "org/model") == first


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--serve", "loong-tny"), "did you mean loong-tiny?"),
        (
            ("--serve", "loong-tiny", "--base-url", "http://localhost:8000"),
            "so --base-url cannot be given as well",
        ),
    ],
)
def test_a_chat_that_cannot_serve_says_why(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_chat_may_bring_its_own_server(tmp_path: Path) -> None:
    chat = subprocess.run(
        [
            sys.executable,
            "-c",
            ENTRY,
            "chat",
            "--serve",
            "loong-tiny",
            "--temperature",
            "0",
            "--max-tokens",
            "9",
        ],
        input="What is a ring?\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        check=False,
    )
    assert chat.returncode == 0, chat.stderr
    assert "starting loong-tiny on 4 CPU instances" in chat.stderr
    assert len(chat.stdout.strip()) > 1
    (url,) = re.findall(r"http://\S+", chat.stderr)
    with pytest.raises(httpx.ConnectError):  # the server has ended with the chat
        httpx.get(url)
