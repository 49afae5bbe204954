"""`n`: several answers to one prompt, which the engine is asked for at once."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from http_answers import NOTHING_CACHED, error_of, events_of, get_json, post
from listening import BESIDE_ITS_ENGINE
from openai import AsyncOpenAI
from scripted_engine import ScriptedEngine, Serving

from loong.core.request import FinishReason, NewRequest
from loong.engine.client import EngineLimits

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
TEXTS = ("one", "two STOP on", "three and some more")


def by_seed(request: NewRequest) -> Sequence[int]:
    """Another text for each seed from 7 on."""
    return [*TEXTS[request.sampling_params.seed - 7].encode()]


def engine() -> ScriptedEngine:
    return ScriptedEngine(by_seed, last_reason=FinishReason.STOP)


def parts_of(events: Sequence[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [part for event in events for part in event["choices"] if part["index"] == index]


async def test_choices_are_one_request_whose_seeds_count_up(serving: Serving) -> None:
    asked = engine()
    async with serving(asked) as url:
        answer = (await post(url, PATH, prompt="abc", n=3, seed=7, max_tokens=40)).json()
    (request,) = asked.requests
    assert request.num_choices == 3
    assert answer["id"] == request.request_id
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == [text[:-1] for text in TEXTS]
    num_tokens = sum(map(len, TEXTS))
    counts = {
        "prompt_tokens": 4,
        "completion_tokens": num_tokens,
        "total_tokens": 4 + num_tokens,
        **NOTHING_CACHED,
    }
    assert answer["usage"] == counts


@pytest.mark.parametrize("path", [PATH, CHAT])
async def test_a_stream_reports_every_choice_what_the_whole_answer_does(serving: Serving, path: str) -> None:
    prompt = {"prompt": "abc"} if path == PATH else {"messages": [{"role": "user", "content": "abc"}]}
    logprobs: dict[str, object] = {"logprobs": 1} if path == PATH else {"logprobs": True, "top_logprobs": 1}
    body = {**prompt, **logprobs, "n": 3, "seed": 7, "max_tokens": 40, "return_token_ids": True}
    async with serving(engine()) as url:
        whole = (await post(url, path, **body)).json()
        events = events_of(await post(url, path, stream=True, stream_options={"include_usage": True}, **body))
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = parts_of(events, choice["index"])
        if path == PATH:
            assert "".join(part["text"] for part in parts) == choice["text"]
            reported = [token for part in parts for token in part["logprobs"]["tokens"]]
            assert reported == choice["logprobs"]["tokens"]
        else:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(part["delta"]["content"] for part in parts) == choice["message"]["content"]
            parts = parts[1:]
        assert [token_id for part in parts for token_id in part["token_ids"]] == choice["token_ids"]
        assert [part["finish_reason"] for part in parts][-2:] == [None, "stop"]


async def test_a_choice_that_a_stop_string_ends_is_aborted_and_the_others_go_on(serving: Serving) -> None:
    asked = engine()
    async with serving(asked) as url:
        body = {"prompt": "abc", "n": 3, "seed": 7, "max_tokens": 40, "stop": "STOP"}
        whole = (await post(url, PATH, **body)).json()
        async with httpx.AsyncClient(timeout=30) as client:
            metrics = (await client.get(url + "/metrics")).text.splitlines()
    second = asked.requests[0].choice_ids[1]
    assert len("two STOP") <= asked.num_produced[second] < 30  # soon after
    assert asked.abort_reasons == {second: FinishReason.STOP}
    assert [choice["text"] for choice in whole["choices"]] == ["on", "two ", "three and some mor"]
    assert [choice["stop_reason"] for choice in whole["choices"]] == [None, "STOP", None]
    ended = [line for line in metrics if line.startswith("vllm:request_success_total") and '"stop"' in line]
    assert float(ended[0].split()[-1]) == 3
    prompts = [line for line in metrics if line.startswith("vllm:prompt_tokens_total")]
    assert float(prompts[0].split()[-1]) == 4


async def test_each_of_several_prompts_has_n_choices(serving: Serving) -> None:
    asked = ScriptedEngine()
    async with serving(asked) as url:
        body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 4, "echo": True, "return_token_ids": True}
        answer = (await post(url, PATH, **body)).json()
    reported = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert reported == [(0, "abab"), (1, "abab"), (2, "ccc"), (3, "ccc")]
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [[256, 97, 98]] * 2 + [[256, 99]] * 2
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 16,
        "total_tokens": 21,
        **NOTHING_CACHED,
    }
    ids = [i for request in asked.requests for i in request.choice_ids]
    assert len(set(ids)) == len(ids) == 4


async def test_a_client_that_leaves_ends_all_choices(serving: Serving) -> None:
    asked = ScriptedEngine(pause_at=3)
    async with (
        serving(asked) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = await client.completions.create(model="tiny", prompt="abc", n=3, stream=True)
        await anext(stream.__aiter__())
        await stream.close()
        await asked.closed.wait()
        assert (await get_json(url, "/load"))["server_load"] == 0


async def test_the_official_client_gets_every_choice(serving: Serving) -> None:
    async with (
        serving(engine()) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": "hi"}]
        answer = await client.chat.completions.create(
            model="tiny",
            messages=messages,  # type: ignore[arg-type]  # one of a union of nine
            n=3,
            seed=7,
        )
    assert [choice.message.content for choice in answer.choices] == [text[:-1] for text in TEXTS]


@BESIDE_ITS_ENGINE
async def test_choices_need_room_for_all_of_them(serving: Serving) -> None:
    limits = EngineLimits(max_model_len=2048, max_request_kv=100, vocab_size=264)
    asked = ScriptedEngine(limits=limits)
    async with serving(asked) as url:
        error = await error_of(url, PATH, 400, prompt=[97] * 20, n=8, max_tokens=11)
        unasked = await post(url, PATH, prompt=[97] * 20, n=8)
        full = await error_of(url, PATH, 400, prompt=[97] * 95, n=8)
    assert "max_tokens is 11 for each of 8 choices, together 108" in error["message"]
    assert "room for 100 tokens of one request" in error["message"]
    assert unasked.json()["usage"]["completion_tokens"] == 8 * 10
    assert "room for one more for each of 8 choices" in full["message"]


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("n", [0, 17, -1])
async def test_more_choices_than_there_may_be_are_refused_with_the_limit(serving: Serving, n: int) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, PATH, 400, prompt="a", n=n)
    assert error["param"] == "n"
    assert ("16" if n > 16 else "1") in error["message"]
