"""Prompts cut to their last tokens."""

from typing import Any

import pytest
from http_answers import error_of, post
from listening import BESIDE_ITS_ENGINE
from scripted_engine import ScriptedEngine, Serving

from loong.engine.client import EngineLimits

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = EngineLimits(max_model_len=100, max_request_kv=60, vocab_size=264)


async def asked(serving: Serving, path: str, **body: Any) -> tuple[ScriptedEngine, dict[str, Any]]:
    """Return the engine that was asked, and its answer."""
    engine = ScriptedEngine(limits=LIMITS)
    async with serving(engine) as url:
        response = await post(url, path, **body)
    assert response.status_code == 200, response.text
    return engine, response.json()


@BESIDE_ITS_ENGINE
async def test_the_last_tokens_of_each_prompt_are_kept(serving: Serving) -> None:
    engine, answer = await asked(
        serving, COMPLETIONS, prompt=["hello", "hi"], truncate_prompt_tokens=4, return_token_ids=True
    )
    prompts = [list(request.prompt_token_ids) for request in engine.requests]
    assert sorted(prompts) == [[*b"ello"], [256, *b"hi"]]
    assert answer["usage"]["prompt_tokens"] == 7
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[*b"ello"], [256, *b"hi"]]


@BESIDE_ITS_ENGINE
async def test_what_is_echoed_is_what_is_kept(serving: Serving) -> None:
    _, answer = await asked(
        serving, COMPLETIONS, prompt="hello", truncate_prompt_tokens=3, echo=True, logprobs=0, max_tokens=1
    )
    (choice,) = answer["choices"]
    assert choice["text"] == "llol"
    assert choice["logprobs"]["tokens"] == ["l", "l", "o", "l"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


@BESIDE_ITS_ENGINE
async def test_chats_are_cut_too(serving: Serving) -> None:
    messages = [{"role": "user", "content": "a long question"}]
    engine, answer = await asked(serving, CHAT, messages=messages, truncate_prompt_tokens=5, max_tokens=2)
    assert len(engine.requests[0].prompt_token_ids) == 5
    assert answer["usage"]["prompt_tokens"] == 5


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        (COMPLETIONS, {"prompt": [1] * 200}, 44),  # with 16 tokens of output, of 60 in KV
        (COMPLETIONS, {"prompt": [1] * 200, "max_tokens": 10, "n": 2}, 40),
        (COMPLETIONS, {"prompt": [1] * 20, "max_tokens": 10}, 20),
        (COMPLETIONS, {"prompt": [1] * 200, "max_tokens": 0, "echo": True}, 60),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 200}]}, 59),
    ],
)
async def test_minus_1_keeps_what_fits(serving: Serving, path: str, body: dict[str, Any], kept: int) -> None:
    engine, _ = await asked(serving, path, **body, truncate_prompt_tokens=-1)
    assert len(engine.requests[0].prompt_token_ids) == kept


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("wrong", [0, -2, 1.5, "4", True, 2**31])
async def test_other_numbers_are_refused_by_name(serving: Serving, path: str, wrong: object) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} if path == CHAT else {"prompt": "a"}
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, path, 400, **body, truncate_prompt_tokens=wrong)
    assert error["param"] == "truncate_prompt_tokens"
    assert "truncate_prompt_tokens" in error["message"]


@BESIDE_ITS_ENGINE
async def test_a_prompt_that_is_still_too_long_is_refused(serving: Serving) -> None:
    async with serving(ScriptedEngine(limits=LIMITS)) as url:
        error = await error_of(url, COMPLETIONS, 400, prompt=[1] * 200, truncate_prompt_tokens=90)
    assert error["code"] == "context_length_exceeded"
