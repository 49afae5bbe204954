"""The fields of requests and answers that concern the prefix cache."""

from typing import Any

import pytest
from http_answers import error_of, events_of, post
from listening import BESIDE_ITS_ENGINE
from scripted_engine import ScriptedEngine, Serving

MESSAGES = [{"role": "user", "content": "hi"}]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
}


def cached(usage: dict[str, Any]) -> object:
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("number", [0, 3])
async def test_an_answer_and_a_stream_say_how_much_of_the_prompt_was_cached(
    path: str, number: int, serving: Serving
) -> None:
    async with serving(ScriptedEngine(num_cached_tokens=number)) as url:
        answer = (await post(url, path, **PATHS[path])).json()
        events = events_of(await post(url, path, **PATHS[path], **STREAM))
        options = {"include_usage": True, "continuous_usage_stats": True}
        counted = events_of(await post(url, path, **PATHS[path], stream=True, stream_options=options))
    assert cached(answer["usage"]) == number
    assert cached(events[-1]["usage"]) == number
    assert cached(counted[-2]["usage"]) == cached(counted[-1]["usage"]) == number


async def test_cached_tokens_of_a_prompt_count_once_for_all_choices(serving: Serving) -> None:
    body = {"prompt": ["abc", "defg"], "n": 3, "max_tokens": 2}
    async with serving(ScriptedEngine(num_cached_tokens=3)) as url:
        assert cached((await post(url, "/v1/completions", **body)).json()["usage"]) == 6
        assert cached(events_of(await post(url, "/v1/completions", **body, **STREAM))[-1]["usage"]) == 6


async def test_answers_in_other_forms_say_it_too(serving: Serving) -> None:
    async with serving(ScriptedEngine(num_cached_tokens=3)) as url:
        response = (await post(url, "/v1/responses", input="hi", max_output_tokens=2)).json()
        generated = (await post(url, "/generate", inputs="abc", parameters={"max_new_tokens": 2})).json()
        streamed = (await post(url, "/generate_stream", inputs="abc", parameters={"max_new_tokens": 2})).text
        events = (await post(url, "/v1/responses", input="hi", max_output_tokens=2, stream=True)).text
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert generated["cached_tokens"] == 3
    assert streamed.count('"cached_tokens":3') == 2
    assert events.count('"cached_tokens":3') == 1


BODIES = {
    **PATHS,
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/generate": {"inputs": "abc", "parameters": {"max_new_tokens": 2}},
}


def body_with(path: str, **fields: object) -> dict[str, Any]:
    body = BODIES[path]
    return body | ({"parameters": body["parameters"] | fields} if path == "/generate" else fields)


@pytest.mark.parametrize("path", BODIES)
async def test_requests_share_with_those_of_the_same_salt_which_no_log_shows(
    path: str, serving: Serving
) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        for fields in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}, {"cache_salt": "one"}):
            assert (await post(url, path, **body_with(path, **fields))).status_code == 200
        assert (await post(url, path, **body_with(path, use_prefix_cache=False))).status_code == 200
    none, one, two, again, off = engine.requests
    assert none.cache_salt == off.cache_salt == ""
    assert one.cache_salt == again.cache_salt != two.cache_salt
    assert "one" not in one.cache_salt
    assert [request.uses_cache for request in engine.requests] == [True] * 4 + [False]


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("salt", ["", "a" * 1025, 7, ["a"]])
async def test_what_is_no_salt_is_refused(salt: object, serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        for path in PATHS:
            error = await error_of(url, path, 400, **PATHS[path], cache_salt=salt)
            assert error["param"] == "cache_salt"


async def test_the_cache_is_reset_on_request(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        answer = await post(url, "/reset_prefix_cache")
    assert (answer.status_code, answer.json(), engine.num_resets) == (200, {"status": "reset"}, 1)


async def test_where_there_is_an_admin_key_only_it_resets_the_cache(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine, admin_key="operators") as url:
        assert (await post(url, "/reset_prefix_cache")).status_code == 401
    assert engine.num_resets == 0
