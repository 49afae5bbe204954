"""LightLLM's wire format, on a small server that speaks it."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from scripted_server import serve_script

from loong.workloads.client.backends import ServerApi
from loong.workloads.client.client import Target, run_load
from loong.workloads.metrics.record import RequestRecord, TokenUsage
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest


def light_event(number: int, last: int, prompt_tokens: int, reason: str = "length") -> bytes:
    """Return one token, as LightLLM streams it: no space behind `data:`, and no `[DONE]` at the end."""
    token = {
        "id": 7,
        "text": " a",
        "logprob": -0.1,
        "special": False,
        "count_output_tokens": number,
        "prompt_tokens": prompt_tokens,
    }
    finished = number == last
    ending = {"finished": finished, "finish_reason": reason if finished else None, "details": None}
    return f"data:{json.dumps({'token': token, 'generated_text': None, **ending})}\n\n".encode()


async def sent(bodies: list[dict[str, Any]], reason: str = "length") -> RequestRecord:
    async def generate(body: dict[str, Any], response: web.StreamResponse) -> None:
        bodies.append(body)
        last = body["parameters"]["max_new_tokens"]
        for number in range(1, last + 1):
            await response.write(light_event(number, last, len(body["inputs"]), reason))

    async with serve_script(generate, "/generate_stream") as base_url:
        extra: dict[str, object] = {"do_sample": True, "top_k": 5}
        target = Target(base_url, "", vocab_size=100, backend=ServerApi.LIGHTLLM, extra_body=extra)
        request = WorkloadRequest(0.0, RequestShape((TokenRun(3, 5),), 4))
        [record] = await run_load(target, [request])
    return record


async def test_lightllm_gets_token_ids_and_what_else_is_asked_for_and_its_tokens_are_counted() -> None:
    bodies: list[dict[str, Any]] = []
    record = await sent(bodies)
    assert record.error is None
    assert record.usage == TokenUsage(5, 4)
    assert len(record.token_times) == 4
    assert bodies == [
        {
            "inputs": TokenRun(3, 5).token_ids(100),
            "parameters": {"max_new_tokens": 4, "ignore_eos": True, "do_sample": True, "top_k": 5},
        }
    ]


async def test_an_answer_that_lightllm_gives_up_is_a_failure() -> None:
    record = await sent([], reason="abort")
    assert record.error == "error in the stream: the server gave up the request"


@pytest.mark.parametrize("backend", list(ServerApi))
async def test_a_server_of_the_other_kind_is_a_failure(backend: ServerApi) -> None:
    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 422 Unprocessable\r\nContent-Length: 12\r\n\r\n{"error": 1}')
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(hello, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()[:2]
        target = Target(f"http://{host}:{port}", "m", vocab_size=100, backend=backend)
        [record] = await run_load(target, [WorkloadRequest(0.0, RequestShape((TokenRun(3, 5),), 4))])
    assert record.error == 'HTTP 422: {"error": 1}'
