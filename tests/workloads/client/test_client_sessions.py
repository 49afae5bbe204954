import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

from aiohttp import web
from scripted_server import serve_script

from loong.workloads.client.backends import ServerApi
from loong.workloads.client.client import TURN_FAILED, Target, run_load
from loong.workloads.metrics.record import CUT_OFF, RequestRecord, TokenUsage
from loong.workloads.request import RequestShape, TokenRun, Turn, WorkloadRequest

VOCABULARY = 100
THINK_TIME = 0.01


def session(session_id: int, num_turns: int = 3) -> list[WorkloadRequest]:
    """Return turns of 5 new tokens and answers of 2."""
    turns: list[WorkloadRequest] = []
    for number in range(num_turns):
        think_time = THINK_TIME if number else 0.0
        run = TokenRun(10 * session_id + number, 5)
        shape = RequestShape((run,), 2, turn=Turn(session_id, number, num_turns, think_time))
        if number:
            shape = shape.after(turns[-1].shape, 2)
        turns.append(WorkloadRequest(0.0, shape))
    return turns


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


class Server:
    """Answers with token ids made of the length of the prompt, `num_named` of them named."""

    def __init__(self, num_tokens: int = 2, num_named: int = 2) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._num_tokens, self._num_named = num_tokens, num_named

    async def answer(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        self.bodies.append(body)
        size = len(body["prompt"])
        for index in range(self._num_tokens):
            named = {"token_ids": [size + index]} if index < self._num_named else {}
            await response.write(event(choices=[{"index": 0, "text": "a", "finish_reason": None, **named}]))
        counts = {"prompt_tokens": size, "completion_tokens": self._num_tokens}
        details = {"prompt_tokens_details": {"cached_tokens": size - 5}}
        await response.write(event(choices=[], usage={**counts, **details}))
        await response.write(b"data: [DONE]\n\n")


async def records_of(server: Server, requests: list[WorkloadRequest], **options: Any) -> list[RequestRecord]:
    async with serve_script(server.answer) as base_url:
        return await run_load(Target(base_url, "tiny", VOCABULARY), requests, **options)


async def test_the_prompt_of_a_turn_is_the_turn_before_what_was_answered_and_new_tokens() -> None:
    server, turns = Server(), session(1)
    records = await records_of(server, turns)
    new = [TokenRun(10 + number, 5).token_ids(VOCABULARY) for number in range(3)]
    first, second, third = (body["prompt"] for body in server.bodies)
    assert first == new[0]
    assert second == [*first, 5, 6, *new[1]]
    assert third == [*second, 12, 13, *new[2]]
    assert [record.request for record in records] == turns
    assert [record.usage for record in records] == [TokenUsage(n, 2, n - 5) for n in (5, 12, 19)]


async def test_token_ids_are_asked_for_where_a_turn_follows() -> None:
    server = Server()
    lone = WorkloadRequest(0.0, RequestShape((TokenRun(1, 3),), 2))
    await records_of(server, [*session(1), lone], max_concurrency=1)
    asked = {len(body["prompt"]): body.get("return_token_ids", False) for body in server.bodies}
    assert asked == {5: True, 12: True, 19: False, 3: False}


async def test_a_turn_is_due_its_think_time_after_the_answer_before_it_ended() -> None:
    records = await records_of(Server(), session(1))
    for before, after in pairwise(records):
        assert after.due_time == before.finish_time + THINK_TIME
        assert after.sent_time >= after.due_time


async def test_sessions_run_beside_each_other_within_a_bound_on_what_is_in_flight() -> None:
    num_open, most = 0, 0
    server = Server()

    async def answer(body: dict[str, Any], response: web.StreamResponse) -> None:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await server.answer(body, response)
        num_open -= 1

    requests = [turn for number in range(6) for turn in session(number)]
    async with serve_script(answer) as base_url:
        target = Target(base_url, "tiny", VOCABULARY)
        records = await run_load(target, requests, max_concurrency=2)
    assert all(record.is_completed for record in records)
    assert most <= 2
    assert [record.request for record in records] == requests


async def test_a_shorter_answer_makes_a_shorter_prompt() -> None:
    server = Server(num_tokens=1, num_named=1)
    records = await records_of(server, session(1))
    assert [len(body["prompt"]) for body in server.bodies] == [5, 11, 17]
    assert [record.request.num_prompt_tokens for record in records] == [5, 11, 17]


async def test_turns_after_a_failure_fail_without_being_sent_and_are_reported() -> None:
    reported: list[RequestRecord] = []

    async def fail(body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(event(error={"message": "no room"}))

    async with serve_script(fail) as base_url:
        records = await run_load(Target(base_url, "tiny", VOCABULARY), session(1), on_record=reported.append)
    assert [record.error for record in records] == ["error in the stream: no room", TURN_FAILED, TURN_FAILED]
    assert reported == records


async def test_a_server_that_does_not_name_its_tokens_is_named_in_the_error() -> None:
    records = await records_of(Server(num_named=1), session(1))
    assert records[0].is_completed
    error = "not sent: the server names 1 of the 2 tokens of the answer before it"
    assert [record.error for record in records[1:]] == [error, error]


async def test_lightllm_names_the_tokens_of_its_answers() -> None:
    prompts = []

    async def generate(body: dict[str, Any], response: web.StreamResponse) -> None:
        prompts.append(body["inputs"])
        for number in (1, 2):
            token = {"id": 70 + number, "count_output_tokens": number, "prompt_tokens": len(body["inputs"])}
            await response.write(event(token=token, finished=number == 2))

    async with serve_script(generate, "/generate_stream") as base_url:
        target = Target(base_url, "", VOCABULARY, backend=ServerApi.LIGHTLLM)
        records = await run_load(target, session(1, num_turns=2))
    assert [record.error for record in records] == [None, None]
    assert prompts[1][:7] == [*prompts[0], 71, 72]


async def test_a_run_that_is_cut_off_sends_no_later_turn() -> None:
    num_reported = 0

    def count(_record: RequestRecord) -> None:
        nonlocal num_reported
        num_reported += 1

    server = Server()
    waiting = [replace(turn, arrival_time=3600.0) for turn in session(2)]
    records = await records_of(
        server, [*session(1), *waiting], on_record=count, is_hopeless=lambda _: num_reported == 2
    )
    assert [record.error for record in records] == [None, None, CUT_OFF, CUT_OFF, CUT_OFF, CUT_OFF]
    assert len(server.bodies) == 2


async def test_a_later_turn_that_is_cut_off_in_flight_says_so() -> None:
    server = Server()
    is_asked = asyncio.Event()

    async def answer(body: dict[str, Any], response: web.StreamResponse) -> None:
        if len(body["prompt"]) == 12:
            is_asked.set()
            await asyncio.Event().wait()
        if len(body["prompt"]) == 4:
            await is_asked.wait()
        await server.answer(body, response)

    requests = [*session(1), WorkloadRequest(0.0, RequestShape((TokenRun(1, 4),), 2))]
    async with serve_script(answer) as base_url:
        records = await run_load(
            Target(base_url, "tiny", VOCABULARY), requests, is_hopeless=lambda _: is_asked.is_set()
        )
    assert [record.error for record in records] == [None, CUT_OFF, CUT_OFF, None]
