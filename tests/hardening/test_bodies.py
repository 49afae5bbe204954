"""Bodies that are too long, too slow, compressed, cut off or too many."""

import asyncio
import gzip
import json
import logging
from collections.abc import Sequence

import httpx
import pytest
from aiohttp import ClientConnectionResetError
from http_answers import JSON_TYPE, error_of, post
from raw_http import COMPLETIONS, completion_request, raw_connection, request_head
from scripted_engine import ScriptedEngine, Serving

from loong.core.request import NewRequest, TokenId

BODY = json.dumps({"prompt": "a" * 500, "max_tokens": 1}).encode()


async def test_a_body_that_says_that_it_is_too_long_is_refused_before_it_is_sent(serving: Serving) -> None:
    async with serving(ScriptedEngine(), max_body_bytes=1000) as url, raw_connection(url) as connection:
        await connection.send(request_head(COMPLETIONS, "Content-Length: 1001"))
        assert await connection.status() == 413


async def test_a_body_of_untold_length_is_refused_where_it_becomes_too_long(serving: Serving) -> None:
    async with serving(ScriptedEngine(), max_body_bytes=1000) as url, raw_connection(url) as connection:
        await connection.send(request_head(COMPLETIONS, "Transfer-Encoding: chunked"))
        await connection.send(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert await connection.status() == 413


async def test_a_body_whose_chunks_are_none_is_refused(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url, raw_connection(url) as connection:
        await connection.send(request_head(COMPLETIONS, "Transfer-Encoding: chunked") + b"2\r\n{ \r\n")
        await connection.send(b"nonsense\r\n")
        assert await connection.status() == 400


async def test_a_body_that_trickles_in_is_dropped(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine, body_timeout=0.1) as url, raw_connection(url) as connection:
        await connection.send(request_head(COMPLETIONS, "Content-Length: 100000"))

        async def trickle() -> None:
            while True:
                await connection.send(b" ")
                await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as tasks:
            trickling = tasks.create_task(trickle())
            assert await connection.status() == 408
            trickling.cancel()
    assert not engine.requests


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, gzip", "nonsense"])
async def test_a_compressed_body_is_refused_unread(serving: Serving, encoding: str) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    headers = {**JSON_TYPE, "Content-Encoding": encoding}
    async with serving(ScriptedEngine()) as url, httpx.AsyncClient(timeout=30) as client:
        response = await client.post(url + COMPLETIONS, content=bomb, headers=headers)
    assert response.status_code == 415
    assert encoding in response.json()["error"]["message"]


async def test_bodies_that_are_too_much_together_are_refused_until_there_is_room(serving: Serving) -> None:
    async with serving(ScriptedEngine(), max_bodies_bytes=len(BODY), retry_after=3) as url:
        async with raw_connection(url) as holding, httpx.AsyncClient(timeout=30) as client:
            await holding.send(request_head(COMPLETIONS, "Content-Length: 10000") + b" " * 100)
            while (
                refused := await client.post(url + COMPLETIONS, content=BODY, headers=JSON_TYPE)
            ).status_code == 200:
                pass  # the other's first bytes are on their way
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "3")
        assert refused.json()["error"]["code"] == "too_many_bodies"
        while (await post(url, COMPLETIONS, prompt="a" * 500, max_tokens=1)).status_code != 200:
            pass  # until the server has seen the other leave


async def test_a_body_that_is_cut_off_is_forgotten(serving: Serving) -> None:
    async with serving(ScriptedEngine(), max_bodies_bytes=len(BODY) + 100) as url:
        for _ in range(20):
            async with raw_connection(url) as connection:
                await connection.send(request_head(COMPLETIONS, "Content-Length: 1000") + b"{" * 500)
        while (await post(url, COMPLETIONS, prompt="a" * 500, max_tokens=1)).status_code != 200:
            pass


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 100 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        request_head(COMPLETIONS, "Content-Length: -1"),
        request_head(COMPLETIONS, "Content-Length: 1", "Transfer-Encoding: chunked"),
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 10_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 1000 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # what TLS begins with
    ],
)
async def test_what_is_no_request_is_answered_400_and_closed(serving: Serving, garbage: bytes) -> None:
    async with serving(ScriptedEngine()) as url:
        async with raw_connection(url) as connection:
            await connection.send(garbage)
            assert await connection.status() == 400
            await connection.is_closed()
        assert (await post(url, COMPLETIONS, prompt="a")).status_code == 200


async def test_broken_chunks_are_the_clients_fault(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url, raw_connection(url) as connection:
        await connection.send(request_head(COMPLETIONS, "Transfer-Encoding: chunked") + b"5\r\nab")
        await connection.send(b"zzzzzzzzz\r\n")
        assert await connection.status() == 400


async def test_requests_sent_ahead_are_answered_in_order(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url, raw_connection(url) as connection:
        await connection.send(b"".join(completion_request(prompt=[n], max_tokens=1) for n in range(1, 51)))
        for _ in range(50):
            assert await connection.status() == 200
            head = await connection.reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
            await connection.reader.readexactly(int(length.split()[1]))
    assert [request.prompt_token_ids[0] for request in engine.requests] == [*range(1, 51)]


async def test_an_id_that_a_client_brings_is_not_the_requests(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url, httpx.AsyncClient(timeout=30) as client:
        for _ in range(2):
            headers = {"X-Request-Id": "mine"}
            await client.post(url + COMPLETIONS, json={"prompt": "a"}, headers=headers)
        await error_of(url, COMPLETIONS, 400, prompt="a", request_id="mine")
    ids = {request.request_id for request in engine.requests}
    assert len(ids) == 2
    assert not any("mine" in request_id for request_id in ids)


async def test_what_is_no_request_leaves_no_word_in_the_log(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(ScriptedEngine()) as url, raw_connection(url) as connection:
        await connection.send(b"nonsense\r\n\r\n")
        assert await connection.status() == 400
    assert not caplog.records


async def test_who_leaves_before_the_answer_begins_leaves_no_word_in_the_log(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    def write_headers(request: NewRequest) -> Sequence[TokenId]:
        raise ClientConnectionResetError("Cannot write to closing transport")  # as aiohttp does

    caplog.set_level(logging.INFO)
    async with serving(ScriptedEngine(write_headers)) as url, raw_connection(url) as connection:
        await connection.send(completion_request(prompt="a"))
        assert await connection.status() == 500
    assert not caplog.records


@pytest.mark.parametrize("path", [COMPLETIONS, "/nothing"])
@pytest.mark.parametrize("expected", [b"\x80", b"nonsense"])
async def test_an_expectation_that_is_not_met_is_refused(
    serving: Serving, path: str, expected: bytes
) -> None:
    async with serving(ScriptedEngine()) as url, raw_connection(url) as connection:
        head = request_head(path, "Content-Length: 2", "Expect: IT")
        await connection.send(head.replace(b"IT", expected) + b"{}")
        assert await connection.status() == 417
        assert b"X-Request-Id: " in await connection.reader.readuntil(b"\r\n\r\n")
