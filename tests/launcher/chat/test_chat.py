"""Conversations with a real server whose model is a script."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from re import fullmatch

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from listening import serving_with
from scripted_engine import ScriptedEngine, say

from loong.core.errors import ConfigError
from loong.launcher.chat.client import ChatError, ChatServer, Piece
from loong.launcher.chat.session import Session
from loong.launcher.chat.speed import AnswerSpeed
from loong.launcher.cli import main
from loong.model.tiny import CONFIG, tiny_model
from loong.server.text.tokenizer import Tokenizer


@asynccontextmanager
async def talking(folder: Path, engine: ScriptedEngine, **settings: object) -> AsyncIterator[Session]:
    tokenizer = Tokenizer.from_folder(tiny_model(folder), CONFIG.eos_token_ids)
    async with serving_with(tokenizer)(engine, **settings) as url:
        yield Session(ChatServer(url), {"max_tokens": 100}, out=io.StringIO(), notes=io.StringIO())


async def take(session: Session, *lines: str) -> str:
    """Type lines; what is printed."""
    for line in lines:
        assert await asyncio.to_thread(session.take, line)
    assert isinstance(session.out, io.StringIO)
    return session.out.getvalue()


async def test_an_answer_is_printed_and_remembered(tmp_path: Path) -> None:
    engine = ScriptedEngine(say("Well, well."))
    async with talking(tmp_path, engine) as session:
        assert await take(session, "hello") == "Well, well.\n"
        await take(session, "and now?")
    contents = [message["content"] for message in session.messages]
    assert contents == ["hello", "Well, well.", "and now?", "Well, well."]
    assert len(engine.requests[1].prompt_token_ids) > len(engine.requests[0].prompt_token_ids) + 10


async def test_an_answer_is_followed_by_a_note_of_its_speed_apart_from_it(tmp_path: Path) -> None:
    async with talking(tmp_path, ScriptedEngine(say("Well, well."))) as session:
        assert await take(session, "hello") == "Well, well.\n"
    assert isinstance(session.notes, io.StringIO)
    noted = fullmatch(
        r"\(first token after \d+\.\d\d s, then (\d+\.\d) tokens/s\)\n", session.notes.getvalue()
    )
    assert noted is not None
    assert float(noted[1]) > 0


def test_the_speed_counts_the_tokens_after_the_first() -> None:
    speed = AnswerSpeed(asked_at=10.0, first_at=12.5, last_at=14.5, num_tokens=9)
    assert str(speed) == "first token after 2.50 s, then 4.0 tokens/s"
    assert str(replace(speed, num_tokens=None)) == "first token after 2.50 s"
    assert str(replace(speed, num_tokens=1, last_at=12.5)) == "first token after 2.50 s"
    assert not str(replace(speed, first_at=None))


async def test_commands_reset_instruct_help_and_end(tmp_path: Path) -> None:
    async with talking(tmp_path, ScriptedEngine(say("ok"))) as session:
        await take(session, "hello", "/system Be brief.")
        assert session.messages == [{"role": "system", "content": "Be brief."}]
        await take(session, "hello", "/reset")
        assert session.messages == [{"role": "system", "content": "Be brief."}]
        assert "there is no /rest" in await take(session, "/rest", "")
        assert not session.take("/exit")


class Impatient(io.StringIO):
    """Someone who presses Ctrl-C at the third piece of an answer, the first of which is empty."""

    num_pieces = 0

    def flush(self) -> None:
        self.num_pieces += 1
        if self.num_pieces == 3:
            raise KeyboardInterrupt


async def test_an_interrupt_stops_the_answer_and_not_the_conversation(tmp_path: Path) -> None:
    engine = ScriptedEngine(say("a" * 90), pause_at=10)
    async with talking(tmp_path, engine) as session:
        session.out = Impatient()
        assert "(stopped)" in await take(session, "hello")
        await asyncio.wait_for(engine.closed.wait(), 10)  # the request was aborted
        assert session.messages[-1] == {"role": "assistant", "content": "aa"}
        assert engine.num_produced[engine.requests[0].request_id] <= 10


async def test_an_error_is_one_line_and_leaves_no_trace(tmp_path: Path) -> None:
    async with talking(tmp_path, ScriptedEngine(say("abc"), fail_at=2)) as session:
        assert "error: instance 3 is lost" in await take(session, "hello")
        assert not session.messages
        session.options = {"max_tokens": 10**9}
        assert "max_tokens" in await take(session, "hello")


async def test_a_wrong_key_or_address_is_reported(tmp_path: Path) -> None:
    async with talking(tmp_path, ScriptedEngine(), api_keys=("k",)) as session:
        reported = await take(session, "hello")
        assert "needs an API key" in reported
        assert "set $LOONG_API_KEY or --api-key-file" in reported
        served = ChatServer(session.server.base_url + "/v1", "k")
        assert await asyncio.to_thread(served.model) == "tiny"
    with pytest.raises(
        ChatError,
        match="does not answer: Connection refused; start a server in another terminal: loong serve --port",
    ):
        ChatServer(served.base_url).model()


@pytest.mark.parametrize("text", ["<html>", "[]", '{"data": []}'])
async def test_a_server_of_another_kind_is_reported(text: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    async with TestServer(app) as server:
        with pytest.raises(ChatError, match="does not say which models"):
            await asyncio.to_thread(ChatServer(str(server.make_url("")).rstrip("/")).model)


@pytest.mark.parametrize(
    ("event", "reported"), [('{"error": "too busy"}', "too busy"), ("5", "streams 5, which is no event")]
)
async def test_what_a_server_of_another_kind_streams_is_reported_in_a_line(event: str, reported: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=f"data: {event}\n\n")

    def read(url: str) -> list[Piece]:
        return [*ChatServer(url).answer([], {})]

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        with pytest.raises(ChatError, match=reported):
            await asyncio.to_thread(read, str(server.make_url("")).rstrip("/"))


async def test_an_answer_that_breaks_off_is_reported_in_a_line() -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"delta": {"content": "well"}}]}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", break_off)
    async with TestServer(app) as server:
        session = Session(ChatServer(str(server.make_url("")).rstrip("/")), {}, out=io.StringIO())
        reported = await take(session, "hello")
    assert "error: the answer broke off: the server hung up" in reported
    assert not session.messages


async def test_a_refusal_without_a_reason_is_reported_by_its_status() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=502, text="<html>Bad Gateway</html>")

    app = web.Application()
    app.router.add_get("/v1/models", refuse)
    async with TestServer(app) as server:
        with pytest.raises(ChatError, match="answers with status 502"):
            await asyncio.to_thread(ChatServer(str(server.make_url("")).rstrip("/")).model)


async def test_the_command_answers_each_line_it_is_given_until_there_are_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/nonsense\n\nand now?\n"))
    engine = ScriptedEngine(say("Well."))
    tokenizer = Tokenizer.from_folder(tiny_model(tmp_path), CONFIG.eos_token_ids)
    async with serving_with(tokenizer)(engine) as url:
        words = ["chat", "--base-url", url, "--seed", "7", "--max-tokens", "50"]
        assert await asyncio.to_thread(main, words) == 0
    answers = [line for line in capsys.readouterr().out.splitlines() if line == "Well."]
    assert len(answers) == len(engine.requests) == 2
    assert [r.sampling_params.seed for r in engine.requests] == [7, 7]
    assert engine.requests[0].sampling_params.max_tokens == 50


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://", "http://localhost:port", "http://localhost:99999", "http://[::1"]
)
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="not a URL such as"):
        ChatServer(url)


async def test_an_answer_gives_the_terminal_no_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    async with talking(tmp_path, ScriptedEngine(say("\r\x1b]52;c;Zm9v\x07done"))) as session:
        words = ["chat", "--base-url", session.server.base_url, "--max-tokens", "40"]
        assert await asyncio.to_thread(main, words) == 0
    assert "\\u000d\\u001b]52;c;Zm9v\\u0007done" in capsys.readouterr().out
