"""Clients that say nothing, do not listen, or leave, by the hundred."""

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest
from http_answers import get_json, post
from raw_http import COMPLETIONS, completion_request, raw_connection, request_head, until
from scripted_engine import ScriptedEngine, Serving

from loong.engine.client import EngineLimits
from loong.server.api.bounded_site import MAX_REFUSED

BIG = EngineLimits(max_model_len=2**21, max_request_kv=2**21, vocab_size=264)
NUM_IDLE = 300


def num_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


async def test_hundreds_of_idle_connections_delay_no_one_and_are_closed(serving: Serving) -> None:
    before = num_descriptors()
    async with serving(ScriptedEngine(), idle_timeout=1.0) as url, AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(raw_connection(url)) for _ in range(NUM_IDLE)]
        assert (await post(url, COMPLETIONS, prompt="a")).status_code == 200
        for connection in idle:
            assert await connection.is_closed()
    await until(lambda: num_descriptors() <= before)


async def test_a_connection_too_many_is_reported_and_there_is_room_again_when_one_goes(
    serving: Serving,
) -> None:
    async with serving(ScriptedEngine(), max_connections=2, retry_after=7) as url:
        async with raw_connection(url) as first, raw_connection(url) as second:
            for connection in (first, second):
                await connection.send(completion_request(prompt="a", max_tokens=1))
                assert await connection.status() == 200
            for _ in range(2 * MAX_REFUSED):  # also when more come than can be refused
                async with raw_connection(url):
                    pass
            await until_reported(url)
        refused = 503
        while refused == 503:  # until the server has seen them leave
            async with raw_connection(url) as connection:
                await connection.send(completion_request(prompt="a", max_tokens=1))
                refused = await connection.status()
        assert refused == 200


async def until_reported(url: str) -> None:
    """Connect until the server says why it refuses."""
    reported = b""
    while not reported:
        async with raw_connection(url) as connection:
            with suppress(ConnectionError):
                await connection.send(completion_request(prompt="a", max_tokens=1))
                reported = await connection.reader.read()
    head, _, body = reported.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 7" in head
    assert b"X-Request-Id: " in head
    assert json.loads(body)["error"]["message"] == "2 connections are open, and no more may be"


async def test_headers_that_trickle_in_are_dropped(serving: Serving) -> None:
    async with serving(ScriptedEngine(), idle_timeout=0.2) as url, raw_connection(url) as connection:

        async def trickle() -> None:
            await connection.send(b"POST /v1/completions HTTP/1.1\r\n")
            while True:
                await connection.send(b"X: a\r\n")
                await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        assert await connection.is_closed()
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)


async def test_a_connection_that_is_kept_alive_is_closed_in_time(serving: Serving) -> None:
    async with serving(ScriptedEngine(), idle_timeout=0.1) as url, raw_connection(url) as connection:
        await connection.send(completion_request(prompt="a"))
        assert await connection.status() == 200
        await connection.is_closed()


async def test_a_whole_answer_that_nobody_reads_is_given_up(serving: Serving) -> None:
    engine = ScriptedEngine(limits=BIG)
    before = num_descriptors()
    request = completion_request(prompt="abc", max_tokens=20_000, logprobs=20)
    async with (
        serving(engine, write_timeout=0.2, idle_timeout=0.1) as url,
        raw_connection(url, limit=1024) as connection,
    ):
        await connection.send(request)
        await engine.closed.wait()
        await until(lambda: num_descriptors() <= before + 2)  # the listener and the client's own end


@pytest.mark.parametrize("stream", [True, False])
async def test_a_storm_of_clients_that_leave_ends_every_request(serving: Serving, stream: bool) -> None:
    engine = ScriptedEngine(pause_at=1)
    request = completion_request(prompt="abc", max_tokens=10, stream=stream)
    async with serving(engine) as url:
        for _ in range(5):
            async with AsyncExitStack() as stack:
                for _ in range(60):
                    connection = await stack.enter_async_context(raw_connection(url))
                    await connection.send(request)
        while (await get_json(url, "/load"))["server_load"]:
            pass
        engine.resume.set()
        assert (await post(url, COMPLETIONS, prompt="a")).status_code == 200


async def test_clients_that_leave_with_half_a_request_are_forgotten(serving: Serving) -> None:
    engine = ScriptedEngine()
    whole = completion_request(prompt="abc", max_tokens=10)
    async with serving(engine) as url:
        for length in range(0, len(whole), 3):
            async with raw_connection(url) as connection:
                await connection.send(whole[:length])
        assert (await post(url, COMPLETIONS, prompt="a")).status_code == 200
    assert len(engine.requests) == 1


async def test_an_expected_continue_is_given(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url, raw_connection(url) as connection:
        await connection.send(request_head(COMPLETIONS, "Content-Length: 15", "Expect: 100-continue"))
        assert await connection.status() == 100
        await connection.reader.readline()
        await connection.send(b'{"prompt": "a"}')
        assert await connection.status() == 200
