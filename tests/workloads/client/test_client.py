import asyncio
import contextlib
import json
from dataclasses import replace
from time import perf_counter
from typing import Any

import pytest
from aiohttp import web
from scripted_server import Script, serve_script

from loong.workloads.client.client import Target, run_load
from loong.workloads.metrics.record import CUT_OFF, RequestRecord, TokenUsage
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest


def make_request(num_prompt_tokens: int = 6, num_output_tokens: int = 3, at: float = 0.0) -> WorkloadRequest:
    run = TokenRun(seed=num_prompt_tokens, num_tokens=num_prompt_tokens)
    return WorkloadRequest(at, RequestShape((run,), num_output_tokens))


def target(base_url: str, timeout: float = 60.0) -> Target:
    return Target(base_url, model="tiny", vocab_size=100, timeout=timeout)


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def token(text: str = "a", finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}], usage=None)


async def answer(body: dict[str, Any], response: web.StreamResponse) -> None:
    for index in range(body["max_tokens"]):
        await response.write(token(finish_reason="length" if index == body["max_tokens"] - 1 else None))
    counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    await response.write(event(choices=[], usage=counts))
    await response.write(b"data: [DONE]\n\n")


async def record_of(script: Script) -> RequestRecord:
    async with serve_script(script) as base_url:
        [record] = await run_load(target(base_url), [make_request()])
    return record


async def test_records_come_in_the_order_of_the_requests_with_the_servers_counts() -> None:
    requests = [make_request(num_prompt_tokens=n, num_output_tokens=n + 1) for n in (9, 4, 7)]
    async with serve_script(answer) as base_url:
        records = await run_load(target(base_url), requests)
    assert [record.request for record in records] == requests
    assert [record.usage for record in records] == [TokenUsage(9, 10), TokenUsage(4, 5), TokenUsage(7, 8)]
    assert all(record.is_completed for record in records)
    assert all(record.sent_time <= record.token_times[0] <= record.finish_time for record in records)


async def test_the_server_gets_the_prompt_as_token_ids_and_the_length_to_generate() -> None:
    bodies = []

    async def remember(body: dict[str, Any], response: web.StreamResponse) -> None:
        bodies.append(body)
        await answer(body, response)

    request = make_request(num_prompt_tokens=5, num_output_tokens=2)
    named = replace(request, shape=replace(request.shape, user="someone"))
    asked = {"temperature": 0.7, "logit_bias": {"5": 1.5}}
    async with serve_script(remember) as base_url:
        await run_load(target(base_url), [request, named], max_concurrency=1)
        await run_load(replace(target(base_url), extra_body=asked), [request])
    body, body_of_named, body_that_asks = bodies
    assert body_that_asks == {**body, **asked}
    assert body_of_named == {**body, "user": "someone"}
    assert body["prompt"] == request.prompt_token_ids(100)
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (2, True, True)
    assert body["stream_options"] == {"include_usage": True}


async def test_no_request_is_sent_before_its_arrival() -> None:
    requests = [make_request(at=0.02 * index) for index in range(4)]
    async with serve_script(answer) as base_url:
        records = await run_load(target(base_url), requests)
    assert all(record.sent_time >= record.request.arrival_time for record in records)
    assert all(record.lateness >= 0 for record in records)


async def test_a_bound_on_concurrency_is_used_up_and_never_exceeded() -> None:
    pair = asyncio.Barrier(2)
    in_flight: list[int] = []
    num_open = 0

    async def meet(body: dict[str, Any], response: web.StreamResponse) -> None:
        nonlocal num_open
        num_open += 1
        in_flight.append(num_open)
        await pair.wait()
        num_open -= 1
        await answer(body, response)

    async with serve_script(meet) as base_url:
        records = await run_load(target(base_url), [make_request() for _ in range(6)], max_concurrency=2)
    assert max(in_flight) == 2
    assert all(record.is_completed for record in records)


async def test_every_record_is_reported_once_as_it_is_made() -> None:
    reported: list[RequestRecord] = []
    async with serve_script(answer) as base_url:
        records = await run_load(
            target(base_url), [make_request() for _ in range(3)], on_record=reported.append
        )
    assert sorted(map(id, reported)) == sorted(map(id, records))


async def test_comments_and_other_fields_are_not_tokens() -> None:
    async def chatter(body: dict[str, Any], response: web.StreamResponse) -> None:
        for _ in range(3):
            await response.write(b": keep-alive\n\nevent: message\nid: 7\n")
        await answer(body, response)

    record = await record_of(chatter)
    assert record.error is None
    assert len(record.token_times) == 3


async def test_without_usage_the_pieces_of_the_stream_count() -> None:
    async def no_usage(body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(token() + token() + token("", finish_reason="length") + b"data: [DONE]\n\n")

    record = await record_of(no_usage)
    assert record.usage is None
    assert record.num_output_tokens == 2
    assert record.num_prompt_tokens == record.request.num_prompt_tokens


async def test_an_error_in_mid_stream_is_a_failure_with_its_message() -> None:
    async def fail(body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(token())
        await response.write(event(error={"message": "instance 3 is lost", "type": "server_error"}))
        await response.write(b"data: [DONE]\n\n")

    record = await record_of(fail)
    assert record.error is not None
    assert "instance 3 is lost" in record.error
    assert len(record.token_times) == 1


async def test_a_cut_connection_is_a_failure() -> None:
    async def cut(body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(token())
        raise ConnectionResetError("the server fell over")

    record = await record_of(cut)
    assert not record.is_completed


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (token(), "before its last event"),
        (b"data: [DONE]\n\n", "no tokens"),
        (b"data: {nonsense\n\n", "DecodeError"),
        (event(error="out of room"), "out of room"),
    ],
)
async def test_a_stream_that_breaks_the_protocol_is_a_failure(stream: bytes, complaint: str) -> None:
    async def write(body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(stream)

    record = await record_of(write)
    assert record.error is not None
    assert complaint in record.error


async def test_a_refusal_is_a_failure_with_its_status() -> None:
    async with serve_script(answer) as base_url:
        [record] = await run_load(target(f"{base_url}/nowhere"), [make_request()])
    assert record.error is not None
    assert "HTTP 404" in record.error


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with serve_script(answer) as base_url:
        pass
    [record] = await run_load(target(base_url), [make_request()])
    assert not record.is_completed


async def test_a_silent_server_is_given_up_at_the_time_limit() -> None:
    async def hang(body: dict[str, Any], response: web.StreamResponse) -> None:
        await asyncio.Event().wait()

    async with serve_script(hang) as base_url:
        [record] = await run_load(target(base_url, timeout=0.05), [make_request()])
    assert record.error == "no end within the time limit"


async def test_one_failure_leaves_the_others_alone() -> None:
    async def fail_short(body: dict[str, Any], response: web.StreamResponse) -> None:
        if len(body["prompt"]) == 4:
            await response.write(event(error={"message": "no"}))
        else:
            await answer(body, response)

    requests = [make_request(num_prompt_tokens=n) for n in (8, 4, 8)]
    async with serve_script(fail_short) as base_url:
        records = await run_load(target(base_url), requests)
    assert [record.is_completed for record in records] == [True, False, True]


async def test_a_server_with_known_delays_is_seen_to_have_them() -> None:
    first, step = 0.03, 0.01

    async def dawdle(body: dict[str, Any], response: web.StreamResponse) -> None:
        for index in range(body["max_tokens"]):
            await asyncio.sleep(step if index else first)
            await response.write(token())
        await response.write(b"data: [DONE]\n\n")

    start = perf_counter()
    async with serve_script(dawdle) as base_url:
        records = await run_load(target(base_url), [make_request(num_output_tokens=5) for _ in range(20)])
    elapsed = perf_counter() - start
    for record in records:
        assert record.ttft >= first
        assert record.e2el >= first + 4 * step
        assert all(0 <= record.sent_time + time <= elapsed for time in (record.ttft, record.e2el))
        assert record.tpot == pytest.approx((record.e2el - record.ttft) / 4)


class Peer:
    """Answers on bare sockets, and says how many connections it had."""

    def __init__(self, answers_a_connection: int) -> None:
        self.num_connections = 0
        self.num_answers = 0
        self._answers_a_connection = answers_a_connection

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            await self._answer_all(reader, writer)

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(self._answers_a_connection):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
            body = token() + b"data: [DONE]\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            self.num_answers += 1


async def one_after_another(peer: Peer, num_requests: int) -> list[RequestRecord]:
    server = await asyncio.start_server(peer.talk, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        requests = [make_request() for _ in range(num_requests)]
        return await run_load(target(f"http://{host}:{port}"), requests, max_concurrency=1)


async def test_a_connection_is_used_again() -> None:
    peer = Peer(answers_a_connection=10)
    records = await one_after_another(peer, 5)
    assert [record.error for record in records] == [None] * 5
    assert peer.num_connections == 1


async def test_a_kept_connection_that_the_server_has_closed_costs_no_request() -> None:
    peer = Peer(answers_a_connection=1)
    records = await one_after_another(peer, 5)
    assert [record.error for record in records] == [None] * 5
    assert peer.num_answers == 5


async def test_a_hopeless_run_is_cut_off_and_says_so_of_every_request_that_is_left() -> None:
    num_reported = 0

    def count(_record: RequestRecord) -> None:
        nonlocal num_reported
        num_reported += 1

    async def some(body: dict[str, Any], response: web.StreamResponse) -> None:
        if len(body["prompt"]) == 9:
            await asyncio.Event().wait()
        await answer(body, response)

    requests = [make_request(n, at=at) for n, at in ((4, 0.0), (9, 0.0), (4, 0.01), (4, 3600.0))]
    async with serve_script(some) as base_url:
        records = await run_load(
            target(base_url), requests, on_record=count, is_hopeless=lambda _: num_reported == 2
        )
    assert [record.error for record in records] == [None, CUT_OFF, None, CUT_OFF]
    assert [record.request for record in records] == requests
    assert num_reported == 2
