import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from http_answers import error_of, events_of, get_json, post
from listening import BESIDE_ITS_ENGINE
from openai import APIError, AsyncOpenAI
from raw_http import request_head, until
from scripted_engine import ScriptedEngine, Serving

from loong.core.events import ProducedToken
from loong.core.request import FinishReason, NewRequest, TokenId
from loong.engine.client import Answered, EngineLimits, PutToken

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BIG = EngineLimits(max_model_len=2**21, max_request_kv=2**21, vocab_size=264)


@asynccontextmanager
async def raw_stream(
    url: str, body: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection that has asked for a completion, with a reader that takes in little ahead."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(request_head(PATH, f"Content-Length: {len(body)}") + body)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def test_headers_and_comments_come_while_no_token_does(serving: Serving) -> None:
    engine = ScriptedEngine(pause_at=0)
    async with (
        serving(engine, keep_alive_interval=0.01) as url,
        raw_stream(url, b'{"prompt": "a", "stream": true, "max_tokens": 1}') as (reader, _),
    ):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"text/event-stream" in head
        for _ in range(3):
            await reader.readuntil(b": keep-alive\n\n")
        engine.resume.set()
        assert b"data: [DONE]" in await reader.readuntil(b"data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "body"), [(PATH, {"prompt": "abc"}), (CHAT, {"messages": MESSAGES})])
async def test_a_late_failure_is_an_event_before_the_end(
    serving: Serving, path: str, body: dict[str, object]
) -> None:
    async with serving(ScriptedEngine(fail_at=2)) as url:
        *reported, error = events_of(await post(url, path, stream=True, **body))
        refused = await error_of(url, path, 500, **body)
    assert any(event["choices"] for event in reported)
    assert error == {"error": refused}
    assert refused["message"] == "instance 3 is lost"
    assert refused["type"] == "server_error"


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_reported_as_an_error_object_and_only_the_log_says_what(
    serving: Serving, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    def forget(request: NewRequest) -> Sequence[TokenId]:
        raise KeyError("a secret")

    async with serving(ScriptedEngine(forget)) as url:
        if stream:
            (reported,) = events_of(await post(url, PATH, prompt="abc", stream=True))
            error = reported["error"]
        else:
            error = await error_of(url, PATH, 500, prompt="abc")
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in error["message"]
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.exc_info is not None
    assert "a secret" in str(record.exc_info[1])


async def test_the_official_client_raises_a_late_failure(serving: Serving) -> None:
    async with (
        serving(ScriptedEngine(fail_at=2)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.completions.create(model="tiny", prompt="abc", stream=True)
        with pytest.raises(APIError, match="instance 3 is lost"):
            _ = [chunk async for chunk in stream]


@pytest.mark.parametrize("pause_at", [0, 3])
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_client_that_leaves_ends_its_request(
    serving: Serving, caplog: pytest.LogCaptureFixture, pause_at: int, stream: bytes
) -> None:
    caplog.set_level(logging.INFO)
    engine = ScriptedEngine(pause_at=pause_at)
    async with serving(engine) as url:
        async with raw_stream(url, b'{"prompt": "abc", "stream": %s}' % stream):
            await engine.paused.wait()
        await engine.closed.wait()
        load = (await get_json(url, "/load"))["server_load"]
    (request,) = engine.requests
    assert engine.num_produced[request.request_id] == pause_at
    assert load == 0
    left = f"request {request.request_id} aborted after {pause_at} tokens: the client has left"
    assert left in caplog.messages
    assert engine.abort_reasons == {request.request_id: FinishReason.ABORT}


async def test_a_choice_that_fails_ends_the_others_as_failed_too(serving: Serving) -> None:
    def reply(request: NewRequest) -> Sequence[TokenId]:
        return b"abcde"[: 5 - 4 * request.sampling_params.seed]

    engine = ScriptedEngine(reply, last_reason=FinishReason.ERROR, pause_at=1)
    async with serving(engine) as url:
        await error_of(url, PATH, 500, prompt="abc", n=2, seed=0)
        first, _ = engine.requests[0].choice_ids
        await until(lambda: bool(engine.aborted))
    assert engine.abort_reasons == {first: FinishReason.ERROR}


class LastFirst(ScriptedEngine):
    """Produces all tokens of the first choice after all of the others."""

    def submit(self, request: NewRequest, put: PutToken) -> None:
        first, *others = request.choice_ids
        held, running = list[ProducedToken](), set(others)

        def put_later(event: Answered) -> None:
            assert isinstance(event, ProducedToken)
            if event.request_id == first and running:
                held.append(event)
                return
            put(event)
            if event.finish_reason is not None:
                running.discard(event.request_id)
                if not running:
                    for token in held:
                        put(token)
                    held.clear()

        super().submit(request, put_later)


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "rate"}}]])
async def test_the_official_client_reads_choices_of_which_a_later_one_is_first(
    serving: Serving, tools: list[dict[str, object]]
) -> None:
    body: dict[str, object] = {"model": "tiny", "messages": MESSAGES, "n": 3, "seed": 1}
    if tools:
        body["tools"] = tools
    async with (
        serving(LastFirst()) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        async with client.chat.completions.stream(**body) as stream:  # type: ignore[arg-type]
            streamed = await stream.get_final_completion()
        whole = await client.chat.completions.create(**body)  # type: ignore[call-overload]
    assert [choice.message.content for choice in streamed.choices] == [
        choice.message.content for choice in whole.choices
    ]
    assert all(choice.message.content for choice in whole.choices)


async def test_the_official_client_stops_half_way(serving: Serving) -> None:
    engine = ScriptedEngine(pause_at=5)
    async with (
        serving(engine) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await engine.closed.wait()
    assert max(engine.num_produced.values()) <= 5


async def test_a_slow_reader_delays_no_one_else(serving: Serving) -> None:
    engine = ScriptedEngine(limits=BIG)
    body = b'{"prompt": "abc", "stream": true, "max_tokens": 1000000}'
    async with serving(engine) as url, raw_stream(url, body) as (reader, _):
        await reader.readuntil(b"\r\n\r\n")
        answer = await post(url, PATH, prompt="abc", max_tokens=5)
        slow, quick = engine.requests
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert engine.num_produced[slow.request_id] < 1_000_000
    await engine.closed.wait()
    assert engine.num_produced[quick.request_id] == 5


async def test_a_client_that_never_reads_is_given_up(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = ScriptedEngine(limits=BIG)
    body = b'{"prompt": "abc", "stream": true, "max_tokens": 1000000}'
    async with serving(engine, write_timeout=0.05) as url, raw_stream(url, body):
        await engine.closed.wait()
    assert 0 < max(engine.num_produced.values()) < 1_000_000
    assert [record.levelname for record in caplog.records if "aborted" in record.message] == ["INFO"]
    assert "ERROR" not in {record.levelname for record in caplog.records}
