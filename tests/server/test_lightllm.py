"""LightLLM's API over an engine that gives known tokens."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from http_answers import error_of, post
from listening import BESIDE_ITS_ENGINE
from scripted_engine import ScriptedEngine, Serving, say

from loong.core.request import SamplingParams
from loong.server.answers.lightllm import Generated, GeneratedEvent

PATH, STREAM = "/generate", "/generate_stream"


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """Every line that is not empty is an event: there is no comment and no `[DONE]`."""
    assert response.status_code == 200, response.text
    assert response.headers["Content-Type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n") if line]
    assert all(line.startswith("data:") for line in lines)
    return [json.loads(line.removeprefix("data:")) for line in lines]


def asked_of(engine: ScriptedEngine) -> SamplingParams:
    return engine.requests[-1].sampling_params


@BESIDE_ITS_ENGINE
async def test_a_text_is_continued(serving: Serving) -> None:
    engine = ScriptedEngine(lambda request: [*"día".encode(), 257])
    async with serving(engine) as url:
        whole = (await post(url, PATH, inputs="hello")).json()
        streamed = events_of(await post(url, STREAM, inputs="hello"))
    msgspec.convert(whole, Generated)
    assert whole["generated_text"] == ["día"]
    assert whole["finish_reason"] == "stop"
    assert whole["prompt_tokens"] == 6
    assert "tokens" not in whole
    assert len(streamed) == whole["count_output_tokens"] == 5
    for number, event in enumerate(streamed, 1):
        msgspec.convert(event, GeneratedEvent)
        assert event["token"]["count_output_tokens"] == number
        assert event["finished"] == (number == 5)
    assert "".join(event["token"]["text"] for event in streamed) == "día"
    assert [event["token"]["special"] for event in streamed] == [False] * 4 + [True]
    assert streamed[-1]["finish_reason"] == "stop"
    params = asked_of(engine)
    assert (params.temperature, params.max_tokens, params.min_tokens, params.num_logprobs) == (
        0.0,
        16,
        0,
        None,
    )


@BESIDE_ITS_ENGINE
async def test_parameters_reach_the_engine(serving: Serving) -> None:
    engine = ScriptedEngine()
    parameters = {
        "do_sample": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "max_new_tokens": 9,
        "min_new_tokens": 3,
        "ignore_eos": True,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "seed": 5,
    }
    async with serving(engine) as url:
        assert (await post(url, PATH, inputs=[104, 105], parameters=parameters)).status_code == 200
        assert list(engine.requests[-1].prompt_token_ids) == [104, 105]
        first = asked_of(engine)
        drawn = {"do_sample": True, "top_k": -1, "temperature": 0.0}
        assert (await post(url, PATH, inputs="a", parameters=drawn)).status_code == 200
        assert (await post(url, PATH, inputs="a", parameters={"temperature": 2.0})).status_code == 200
    assert first == SamplingParams(
        max_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        seed=5,
        stop_token_ids=(),
    )
    assert [request.sampling_params.temperature for request in engine.requests[1:]] == [0.0, 0.0]


@BESIDE_ITS_ENGINE
async def test_details_and_several_answers_and_stop_sequences(serving: Serving) -> None:
    async with serving(ScriptedEngine(say("one two"))) as url:
        detailed = (await post(url, PATH, inputs="a", parameters={"return_details": True})).json()
        several = (
            await post(url, PATH, inputs="a", parameters={"best_of": 2, "return_details": True})
        ).json()
        stopped = (await post(url, PATH, inputs="a", parameters={"stop_sequences": "two"})).json()
        also = (await post(url, PATH, inputs="a", parameters={"stop_sequences": ["x", " "]})).json()
        events = events_of(await post(url, STREAM, inputs="a", parameters={"return_details": True}))
    for answer in (detailed, several, stopped):
        msgspec.convert(answer, Generated)
    assert "".join(token["text"] for token in detailed["tokens"]) == "one two"
    assert all(token["logprob"] is not None for token in detailed["tokens"])
    assert all(event["token"]["logprob"] is not None for event in events)
    assert several["generated_text"] == ["one two"] * 2
    assert several["count_output_tokens"] == [7, 7]
    assert [len(tokens) for tokens in several["tokens"]] == [7, 7]
    assert (stopped["generated_text"], stopped["finish_reason"]) == (["one "], "stop")
    assert also["generated_text"] == ["one"]


async def test_a_failure_is_an_event(serving: Serving) -> None:
    async with serving(ScriptedEngine(fail_at=1)) as url:
        *_, last = events_of(await post(url, STREAM, inputs="a"))
    assert last["error"]["type"] == "server_error"


async def test_a_client_that_leaves_ends_its_request(serving: Serving) -> None:
    engine = ScriptedEngine(pause_at=1)
    async with serving(engine) as url, httpx.AsyncClient() as client:
        async with client.stream("POST", url + STREAM, json={"inputs": "a"}):
            await engine.paused.wait()
        async with asyncio.timeout(30):
            await engine.closed.wait()
    assert engine.aborted


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("path", [PATH, STREAM])
@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        ({"parameters": {}}, "inputs", "inputs"),
        ({"inputs": ""}, "inputs", "the prompt is empty"),
        ({"inputs": ["a"]}, "inputs", "one text or one list of token ids"),
        ({"inputs": 5}, "inputs", "inputs must be"),
        ({"inputs": [264]}, "inputs", "264"),
        ({"inputs": "a", "stream": True}, "stream", "stream is not supported"),
        ({"inputs": "a", "parameters": {"max_tokens": 5}}, "parameters", "parameters.max_tokens"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, "parameters", "parameters.max_new_tokens"),
        ({"inputs": "a", "parameters": {"max_new_tokens": 10**6}}, "parameters", "max_new_tokens is 1000000"),
        ({"inputs": "a", "parameters": {"min_new_tokens": 17}}, "parameters", "min_new_tokens"),
        ({"inputs": "a", "parameters": {"temperature": -1}}, "parameters", "parameters.temperature"),
        ({"inputs": "a", "parameters": {"top_k": 1.5}}, "parameters", "parameters.top_k"),
        ({"inputs": "a", "parameters": {"do_sample": 1}}, "parameters", "parameters.do_sample"),
        ({"inputs": "a", "parameters": {"n": 2, "best_of": 3}}, "parameters", "best_of is 3 and n is 2"),
        (
            {"inputs": "a", "parameters": {"regular_constraint": "a", "guided_json": {}}},
            "parameters",
            "regular_constraint",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_by_lightllms_names(
    serving: Serving, path: str, body: dict[str, object], param: str, named: str
) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, path, 400, **body)
    assert error["param"] == param
    assert named in error["message"]


@BESIDE_ITS_ENGINE
async def test_a_stream_has_one_answer(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, STREAM, 400, inputs="a", parameters={"n": 2})
    assert "n is 2" in error["message"]
