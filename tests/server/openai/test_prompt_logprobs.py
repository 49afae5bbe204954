"""Log probabilities of a prompt: `prompt_logprobs`, and `echo` with `logprobs`."""

from itertools import chain, pairwise
from typing import Any

import pytest
from http_answers import NOTHING_CACHED, error_of, events_of, post
from hypothesis import given
from hypothesis import strategies as st
from listening import BESIDE_ITS_ENGINE
from openai import AsyncOpenAI
from scripted_engine import ScriptedEngine, Serving, say

from loong.server.openai.parameters import MAX_PROMPT_LOGPROBS
from loong.server.text.echo_offsets import echo_offsets
from loong.server.text.tokenizer import Tokenizer

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]


async def first_choice(url: str, **body: object) -> dict[str, Any]:
    response = await post(url, PATH, **body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def test_an_echo_has_logprobs_of_the_prompt_and_then_of_the_answer(serving: Serving) -> None:
    async with serving(ScriptedEngine(say("aé"))) as url:
        choice = await first_choice(url, prompt="né", echo=True, logprobs=1, max_tokens=3)
    assert choice["text"] == "néaé"
    assert choice["logprobs"] == {
        "tokens": ["<|bos|>", "n", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [None, -1.0, -2.0, -3.0, -0.5, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"o": -0.125, "n": -1.0},
            {"bytes:\\xc4": -0.125, "bytes:\\xc3": -2.0},
            {"bytes:\\xaa": -0.125, "bytes:\\xa9": -3.0},
            {"a": -0.5},
            {"bytes:\\xc3": -0.5},
            {"bytes:\\xa9": -0.5},
        ],
        "text_offset": [0, 0, 1, 1, 2, 3, 3],
    }


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab", "c"], [[97], [98, 99]]])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_the_events_of_an_echo_make_the_whole_answer(
    serving: Serving, prompt: object, max_tokens: int
) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "n": 2, "max_tokens": max_tokens}
    async with serving(ScriptedEngine(say("xyz"))) as url:
        whole = (await post(url, PATH, **body)).json()
        options = {"include_usage": True}
        *events, counts = events_of(await post(url, PATH, stream=True, stream_options=options, **body))
    assert counts["usage"] == whole["usage"]
    for choice in whole["choices"]:
        reported = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in reported) == choice["text"]
        for name, values in choice["logprobs"].items():
            parts = [part["logprobs"][name] for part in reported]
            assert [*chain.from_iterable(parts)] == values
        assert reported[-1]["finish_reason"] == choice["finish_reason"]


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_no_token_may_be_asked_for_but_what_is_said_of_the_prompt(serving: Serving, name: str) -> None:
    engine = ScriptedEngine(say("zz"))
    asked = {name: 0, "return_token_ids": True}
    async with serving(engine) as url:
        echo = (await post(url, PATH, prompt="ab", echo=True, logprobs=0, **asked)).json()
        scored = (await post(url, PATH, prompt="ab", prompt_logprobs=0, **asked)).json()
        plain = (await post(url, PATH, prompt="ab", echo=True, **asked)).json()
        chat = (await post(url, CHAT, messages=MESSAGES, prompt_logprobs=0, **asked)).json()
    assert [request.sampling_params.max_tokens for request in engine.requests] == [1] * 4
    for answer, text in ((echo, "ab"), (scored, ""), (plain, "ab")):
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (text, "length", [])
        assert answer["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 0,
            "total_tokens": 3,
            **NOTHING_CACHED,
        }
    assert echo["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert [answer["choices"][0]["logprobs"] for answer in (scored, plain)] == [None, None]
    assert chat["choices"][0]["message"]["content"] == ""
    assert chat["usage"]["completion_tokens"] == 0


@BESIDE_ITS_ENGINE
async def test_a_prompt_as_long_as_the_model_takes_has_room_for_no_answer(serving: Serving) -> None:
    prompt = [97] * 2048
    async with serving(ScriptedEngine()) as url:
        choice = await first_choice(url, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
        longer = await error_of(url, PATH, 400, prompt=[*prompt, 97], max_tokens=0, echo=True)
        answered = await error_of(url, PATH, 400, prompt=prompt, max_tokens=1, echo=True)
    assert len(choice["logprobs"]["tokens"]) == 2048
    assert "2049 tokens" in longer["message"]
    assert answered["code"] == "context_length_exceeded"


async def test_prompt_logprobs_are_by_token_id_with_ranks(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        choice = await first_choice(url, prompt="ab", prompt_logprobs=1)
        several = (await post(url, PATH, prompt=[[256, 97, 98], [5]], n=2, prompt_logprobs=2)).json()[
            "choices"
        ]
        chat = (await post(url, CHAT, messages=MESSAGES, prompt_logprobs=1, n=2)).json()
    a = (
        {"logprob": -1.0, "rank": 2, "decoded_token": "a"},
        {"logprob": -0.125, "rank": 1, "decoded_token": "b"},
    )
    b = (
        {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
        {"logprob": -0.125, "rank": 1, "decoded_token": "c"},
    )
    both = [None, {"97": a[0], "98": a[1]}, {"98": b[0], "99": b[1]}]
    assert choice["prompt_logprobs"] == both
    assert [*choice["prompt_logprobs"][1]] == ["97", "98"]  # the prompt's own token first
    assert choice["logprobs"] is None
    assert [one["prompt_logprobs"] for one in several] == [both, both, [None], [None]]
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all("prompt_logprobs" not in one for one in chat["choices"])


async def test_an_echo_and_prompt_logprobs_have_as_many_as_each_asked_for(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        choice = await first_choice(url, prompt="ab", echo=True, logprobs=3, prompt_logprobs=0)
    assert engine.requests[0].num_prompt_logprobs == 3
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [3, 3]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1, 1]


@pytest.mark.parametrize("body", [{"echo": True}, {"logprobs": 1}, {"echo": False, "logprobs": 0}])
async def test_an_engine_is_asked_for_no_more_than_the_client_asks(
    serving: Serving, body: dict[str, object]
) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        choice = await first_choice(url, prompt="ab", **body)
    assert engine.requests[0].num_prompt_logprobs is None
    assert "prompt_logprobs" not in choice


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (PATH, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (PATH, {"prompt_logprobs": True}, "prompt_logprobs"),
        (PATH, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 1.5}, "prompt_logprobs"),
        (PATH, {"logprobs": 21, "echo": True}, "logprobs"),
        (PATH, {"max_tokens": 0}, "max_tokens"),
        (PATH, {"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"max_tokens": 0, "echo": True}, "echo"),
        (PATH, {"max_tokens": 0, "echo": True, "min_tokens": 1}, "min_tokens"),
        (PATH, {"max_tokens": -1, "echo": True}, "max_tokens"),
    ],
)
async def test_what_cannot_be_said_is_refused_by_name(
    serving: Serving, path: str, body: dict[str, object], param: str
) -> None:
    engine = ScriptedEngine()
    prompt: dict[str, object] = {"prompt": "a"} if path == PATH else {"messages": MESSAGES}
    async with serving(engine) as url:
        error = await error_of(url, path, 400, **prompt, **body)
    assert error["param"] == param
    assert param in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")],
)
async def test_an_answer_of_too_many_is_refused(
    serving: Serving, body: dict[str, object], param: str
) -> None:
    engine = ScriptedEngine()
    num_prompts = 256
    length = MAX_PROMPT_LOGPROBS // (21 * num_prompts)
    async with serving(engine) as url:
        fitting = await post(url, PATH, prompt=[[97] * 60] * 8, max_tokens=0, **{"echo": True, **body})
        error = await error_of(
            url, PATH, 400, prompt=[[97] * (length + 1)] * num_prompts, max_tokens=1, **body
        )
    assert fitting.status_code == 200
    assert error["param"] == param
    assert f"but at most {MAX_PROMPT_LOGPROBS} are allowed" in error["message"]
    assert len(engine.requests) == 8


@BESIDE_ITS_ENGINE
async def test_the_official_client_reads_an_echo(serving: Serving) -> None:
    async with (
        serving(ScriptedEngine(say("xy"))) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.completions.create(
            model="tiny", prompt="ab", echo=True, logprobs=1, max_tokens=2
        )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [None, -1.0, -2.0, -0.5, -0.5]
    assert logprobs.text_offset == [0, 0, 1, 2, 3]


@given(st.text(min_size=1, max_size=40))
def test_each_token_of_an_echo_is_where_its_text_is(tokenizer: Tokenizer, text: str) -> None:
    token_ids = [256, *text.encode()]
    offsets = echo_offsets(tokenizer, token_ids, text)
    assert offsets[:2] == [0, 0]
    assert all(one <= other for one, other in pairwise(offsets))
    for begin, end, token_id in zip(offsets, [*offsets[1:], len(text)], token_ids, strict=True):
        if token_id < 128:
            assert text[begin:end] == chr(token_id)
