import asyncio
from itertools import chain
from typing import Any

import pytest
from http_answers import NOTHING_CACHED, error_of, events_of, get_json, post
from listening import BESIDE_ITS_ENGINE, serving_with
from openai import AsyncOpenAI, OpenAI
from scripted_engine import ScriptedEngine, Serving, say
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from loong.core.request import SLO, FinishReason
from loong.engine.client import EngineLimits
from loong.server.text.tokenizer import Tokenizer

PATH = "/v1/completions"
TEXT = "日本 and é, 👍🏽 ok"


@BESIDE_ITS_ENGINE
async def test_a_text_prompt_begins_with_the_models_own_token(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        answer = (await post(url, PATH, model="tiny", prompt="abc", max_tokens=5)).json()
    (request,) = engine.requests
    assert request.prompt_token_ids == (256, *b"abc")
    assert answer["object"] == "text_completion"
    assert answer["id"] == request.request_id
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        **NOTHING_CACHED,
    }


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("prompt", [[97, 98], [[97, 98]]])
async def test_token_ids_are_taken_as_they_are(serving: Serving, prompt: object) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        await post(url, PATH, prompt=prompt)
    assert engine.requests[0].prompt_token_ids == (97, 98)
    assert engine.requests[0].sampling_params.max_tokens == 16


@BESIDE_ITS_ENGINE
async def test_a_list_of_one_text_is_that_text(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        await post(url, PATH, prompt=["ab"], add_special_tokens=False)
    assert engine.requests[0].prompt_token_ids == (*b"ab",)


@pytest.mark.parametrize("prompt", [["ab", "c"], [[256, 97, 98], [256, 99]]])
async def test_several_prompts_have_a_choice_each(serving: Serving, prompt: object) -> None:
    engine = ScriptedEngine()
    body = {"prompt": prompt, "max_tokens": 4, "logprobs": 0, "return_token_ids": True}
    async with serving(engine) as url:
        whole = (await post(url, PATH, **body)).json()
        events = events_of(await post(url, PATH, stream=True, **body))
    choices = whole["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "ab"), (1, "cc")]
    assert [choice["prompt_token_ids"] for choice in choices] == [[256, 97, 98], [256, 99]]
    assert whole["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        **NOTHING_CACHED,
    }
    assert len({request.request_id for request in engine.requests}) == 4
    for choice in choices:
        reported = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in reported) == choice["text"]
        assert [*chain.from_iterable(part["token_ids"] for part in reported)] == choice["token_ids"]
        assert [part["finish_reason"] for part in reported] == [None] * 3 + ["length"]


@BESIDE_ITS_ENGINE
async def test_the_counts_of_a_stream_are_of_all_choices(serving: Serving) -> None:
    body = {"prompt": ["ab", "c"], "stream": True, "stream_options": {"include_usage": True}}
    async with serving(ScriptedEngine()) as url:
        *_, last = events_of(await post(url, PATH, **body))
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 32,
        "total_tokens": 37,
        **NOTHING_CACHED,
    }


@BESIDE_ITS_ENGINE
async def test_a_prompt_of_several_that_does_not_fit_is_named(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        error = await error_of(url, PATH, 400, prompt=[[1], [1] * 3000])
    assert "prompt[1] has 3000 tokens" in error["message"]
    assert not engine.requests


async def test_one_choice_that_fails_fails_the_answer_and_ends_the_others(serving: Serving) -> None:
    engine = ScriptedEngine(
        lambda request: [*b"ab"] if 97 in request.prompt_token_ids else [98] * 9, fail_at=5
    )
    async with serving(engine) as url:
        error = await error_of(url, PATH, 500, prompt=["a", "b"])
        assert (await get_json(url, "/load"))["server_load"] == 0
    assert error["message"] == "instance 3 is lost"


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("prompt", ["né", [[*"né".encode()]]])
async def test_an_echo_is_the_prompt_before_the_answer(serving: Serving, prompt: object) -> None:
    body = {"prompt": prompt, "echo": True, "stop": "é", "max_tokens": 20}
    async with serving(ScriptedEngine(say("an é"))) as url:
        whole = (await post(url, PATH, **body)).json()["choices"][0]
        events = events_of(await post(url, PATH, stream=True, **body))
    assert whole["text"] == "néan "
    assert "".join(event["choices"][0]["text"] for event in events) == "néan "


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("token_id", [-1, 264, 2**70])
async def test_ids_that_the_model_lacks_are_not_echoed(serving: Serving, token_id: int) -> None:
    async with serving(ScriptedEngine()) as url:
        assert (await error_of(url, PATH, 400, prompt=[[1], [token_id]], echo=True))["param"] == "prompt"


async def test_every_parameter_reaches_the_engine(serving: Serving) -> None:
    engine = ScriptedEngine()
    asked = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 3,
        "min_p": 0.125,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "seed": 11,
    }
    async with serving(engine) as url:
        schedule = {"slo": {"ttft": 2, "tpot": 0.5}, "priority": -3}
        asked_otherwise = schedule | {
            "logprobs": 2,
            "stop_token_ids": [5],
            "logit_bias": {"5": -100, "97": 1.5},
            "allowed_token_ids": [97, 5],
            "bad_words": ["ab", " c", "d"],
        }
        response = await post(url, PATH, prompt="a", user="me", **asked_otherwise, **asked)
        assert (await post(url, PATH, prompt="a", slo={"tpot": 0.5})).status_code == 200
    assert response.status_code == 200, response.text
    params = engine.requests[0].sampling_params
    assert {name: getattr(params, name) for name in asked} == asked
    assert params.num_logprobs == 2
    assert params.logit_bias == ((5, -100.0), (97, 1.5))
    assert params.allowed_token_ids == (97, 5)
    assert params.bad_words == ((97, 98), (99,), (100,))
    assert params.stop_token_ids == (5, 257, 259)
    assert engine.requests[0].user == "me"
    assert [request.slo for request in engine.requests] == [SLO(2.0, 0.5), SLO(tpot=0.5)]
    assert engine.requests[0].priority == -3


@BESIDE_ITS_ENGINE
async def test_ignoring_the_end_of_sequence_keeps_the_clients_stop_tokens(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        await post(url, PATH, prompt="a", ignore_eos=True, stop_token_ids=[5])
    assert engine.requests[0].sampling_params.stop_token_ids == (5,)


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("top_k", [-1, 0])
async def test_no_top_k_is_written_as_0_or_minus_1(serving: Serving, top_k: int) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        await post(url, PATH, prompt="a", top_k=top_k)
    assert engine.requests[0].sampling_params.top_k is None


async def test_requests_without_a_seed_draw_their_own(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        for _ in range(3):
            await post(url, PATH, prompt="a")
        await post(url, PATH, prompt="a", seed=-1)
    seeds = [request.sampling_params.seed for request in engine.requests]
    assert len(set(seeds)) == 4
    assert seeds[-1] == 2**63 - 1


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("stop", [None, "and", ["👍", "zzz"], "nd é"])
async def test_the_streamed_text_is_the_whole_text(serving: Serving, stop: object) -> None:
    body = {"prompt": "x", "max_tokens": 100, "stop": stop, "return_token_ids": True, "logprobs": 1}
    async with serving(ScriptedEngine(say(TEXT))) as url:
        whole = (await post(url, PATH, **body)).json()["choices"][0]
        events = events_of(await post(url, PATH, stream=True, **body))
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [*chain.from_iterable(choice["token_ids"] for choice in choices)] == whole["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [256, *b"x"]
    for name, values in whole["logprobs"].items():
        assert [*chain.from_iterable(choice["logprobs"][name] for choice in choices)] == values
    for name in ("finish_reason", "stop_reason"):
        assert choices[-1][name] == whole[name]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])


@BESIDE_ITS_ENGINE
async def test_a_stop_string_cuts_the_text_and_ends_the_request(serving: Serving) -> None:
    engine = ScriptedEngine(say("one STOP two"))
    async with serving(engine) as url:
        choice = (await post(url, PATH, prompt="x", max_tokens=100, stop=["STOP"])).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "STOP")
    (num_produced,) = engine.num_produced.values()
    assert len("one STOP") <= num_produced < 50  # soon after
    assert engine.closed.is_set()


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("more", "text", "reason"),
    [
        ({"stop": "foo"}, "one foo", "foo"),
        ({"stop": ["f", "o f"]}, "one f", "f"),
        ({"stop": "foo", "min_tokens": 7}, "one foo foo", "foo"),
        ({"stop_token_ids": [ord("f")]}, "one f", ord("f")),
        ({"stop": "bar"}, "one foo foo", None),
        ({"skip_special_tokens": False}, "one foo foo<|eos|>", None),
    ],
)
async def test_what_stops_an_answer_may_stay_in_its_text(
    serving: Serving, more: dict[str, object], text: str, reason: object
) -> None:
    body = {"prompt": "x", "max_tokens": 50, "include_stop_str_in_output": True, **more}
    async with serving(ScriptedEngine(lambda _: [*b"one foo foo", 257])) as url:
        choice = (await post(url, PATH, **body)).json()["choices"][0]
        events = events_of(await post(url, PATH, stream=True, **body))
    assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == (text, reason, "stop")
    assert "".join(event["choices"][0]["text"] for event in events) == text


@BESIDE_ITS_ENGINE
async def test_log_probabilities_may_name_tokens_by_their_ids(serving: Serving) -> None:
    body = {"max_tokens": 1, "return_tokens_as_token_ids": True}
    async with serving(ScriptedEngine(say("a"))) as url:
        answer = (await post(url, PATH, prompt="x", logprobs=2, **body)).json()
        messages = [{"role": "user", "content": "hi"}]
        chat_body = {"messages": messages, "logprobs": True, "top_logprobs": 2, **body}
        chat = (await post(url, "/v1/chat/completions", **chat_body)).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97"]
    assert list(logprobs["top_logprobs"][0]) == ["token_id:97", "token_id:96"]
    (token,) = chat["choices"][0]["logprobs"]["content"]
    assert (token["token"], bytes(token["bytes"])) == ("token_id:97", b"a")
    assert [top["token"] for top in token["top_logprobs"]] == ["token_id:97", "token_id:96"]


@BESIDE_ITS_ENGINE
async def test_whole_numbers_are_integers(serving: Serving) -> None:
    engine = ScriptedEngine()
    asked = {"max_tokens": 2.0, "seed": -5.0, "top_k": 3.0, "n": 1.0, "logprobs": 0.0, "min_tokens": 1.0}
    async with serving(engine) as url:
        body = {"prompt": [97.0, 98], "stop_token_ids": [3.0], "allowed_token_ids": [97.0, 3]}
        assert (await post(url, PATH, **body, **asked)).status_code == 200
        assert (await post(url, "/detokenize", tokens=[97.0])).json() == {"prompt": "a"}
        parameters = {"max_new_tokens": 3.0, "top_k": 1.0}
        assert (await post(url, "/generate", inputs=[97.0], parameters=parameters)).status_code == 200
        assert (await post(url, "/v1/responses", input="a", max_output_tokens=4.0)).status_code == 200
    params = engine.requests[0].sampling_params
    assert (params.max_tokens, params.top_k, params.num_logprobs, params.min_tokens) == (2, 3, 0, 1)
    assert (params.stop_token_ids[0], params.allowed_token_ids) == (3, (97, 3))
    assert engine.requests[0].prompt_token_ids == (97, 98)
    assert [request.sampling_params.max_tokens for request in engine.requests] == [2, 3, 4]


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_no_probability_takes_the_likeliest_token(
    serving: Serving, path: str, body: dict[str, object]
) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        assert (await post(url, path, **body, top_p=0, temperature=0.8)).status_code == 200
    assert engine.requests[0].sampling_params.temperature == 0


@pytest.mark.parametrize("field", ["allowed_token_ids", "bad_words"])
async def test_an_answer_that_no_token_can_continue_names_the_field(serving: Serving, field: str) -> None:
    engine = ScriptedEngine(say("ab"), last_reason=FinishReason.STUCK)
    value: object = ["x"] if field == "bad_words" else [5]
    async with serving(engine) as url:
        error = await error_of(url, PATH, 400, **{"prompt": "a", field: value})
    assert error["message"] == f"{field}: no token is allowed after 1 of the answer"
    assert error["param"] == field


@BESIDE_ITS_ENGINE
async def test_no_stop_string_ends_what_must_be_longer(serving: Serving) -> None:
    body = {"prompt": "x", "max_tokens": 100, "min_tokens": 4, "stop": "o"}
    async with serving(ScriptedEngine(say("foo and foo"))) as url:
        choice = (await post(url, PATH, **body)).json()["choices"][0]
    assert choice["text"] == "foo and f"


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("min_tokens", "stop", "text", "reason"),
    [
        (5, "and", "foo ", "and"),  # begins before and ends after it
        (6, "and", "foo ", "and"),
        (7, "and", "foo and foo", None),  # ends with the last token that may end nothing
        (6, ["d", " an"], "foo an", "d"),
        (7, ["and", "and f"], "foo ", "and f"),
        (9, "oo", "foo and f", "oo"),
        (11, "oo", "foo and foo", None),
        (0, ["o ", "oo"], "f", "oo"),
        (0, "xf", "foo and foo", None),  # would begin in the prompt
    ],
)
async def test_a_stop_string_may_begin_before_the_answer_may_end(
    serving: Serving, min_tokens: int, stop: object, text: str, reason: str | None
) -> None:
    body = {"prompt": "x", "max_tokens": 20, "min_tokens": min_tokens, "stop": stop, "echo": True}
    async with serving(ScriptedEngine(say("foo and foo"))) as url:
        choice = (await post(url, PATH, **body)).json()["choices"][0]
        events = events_of(await post(url, PATH, stream=True, **body))
    assert (choice["text"], choice["stop_reason"]) == (f"x{text}", reason)
    assert "".join(event["choices"][0]["text"] for event in events) == f"x{text}"
    assert events[-1]["choices"][0]["stop_reason"] == reason


@BESIDE_ITS_ENGINE
async def test_a_beginning_of_a_stop_string_at_the_end_is_reported(serving: Serving) -> None:
    async with serving(ScriptedEngine(say("one ST"))) as url:
        choice = (await post(url, PATH, prompt="x", max_tokens=100, stop="STOP")).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one ST", "length")


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(("token_id", "stop_reason"), [(257, None), (ord("!"), ord("!"))])
async def test_a_token_that_stops_is_not_part_of_the_text(
    serving: Serving, token_id: int, stop_reason: int | None
) -> None:
    engine = ScriptedEngine(lambda request: [*b"hi", token_id, *b"never"])
    async with serving(engine) as url:
        body = {"prompt": "x", "stop_token_ids": [ord("!")], "return_token_ids": True}
        choice = (await post(url, PATH, **body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "stop")
    assert choice["stop_reason"] == stop_reason
    assert choice["token_ids"] == [*b"hi", token_id]


@BESIDE_ITS_ENGINE
async def test_special_tokens_are_shown_if_asked(serving: Serving) -> None:
    engine = ScriptedEngine(lambda request: [97, 258, 98])
    async with serving(engine) as url:
        hidden = (await post(url, PATH, prompt="x")).json()["choices"][0]["text"]
        shown = (await post(url, PATH, prompt="x", skip_special_tokens=False)).json()["choices"][0]["text"]
    assert (hidden, shown) == ("ab", "a<|pad|>b")


async def test_logprobs_name_tokens_and_where_they_begin(serving: Serving) -> None:
    async with serving(ScriptedEngine(say("aé"))) as url:
        choice = (await post(url, PATH, prompt="x", logprobs=2)).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [
            {"a": -0.5, "`": -1.5},
            {"bytes:\\xc3": -0.5, "bytes:\\xc2": -1.5},
            {"bytes:\\xa9": -0.5, "bytes:\\xa8": -1.5},
        ],
        "text_offset": [0, 1, 1],
    }


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ((), {"a": -0.5}),
        (((98, -0.1), (99, -0.2)), {"b": -0.1, "c": -0.2, "a": -0.5}),
        (((98, -0.1), (97, -0.5)), {"b": -0.1, "a": -0.5}),
    ],
)
async def test_the_chosen_token_is_among_the_likeliest_of_completions_but_not_of_chats(
    serving: Serving, top: tuple[tuple[int, float], ...], expected: dict[str, float]
) -> None:
    engine = ScriptedEngine(say("a"), top_logprobs=lambda token_id: top)
    async with serving(engine) as url:
        completion = (await post(url, PATH, prompt="x", logprobs=len(top))).json()["choices"][0]
        body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": len(top)}
        chat = (await post(url, "/v1/chat/completions", **body)).json()["choices"][0]
    (reported,) = completion["logprobs"]["top_logprobs"]
    assert [*reported.items()] == [*expected.items()]
    assert [entry["logprob"] for entry in chat["logprobs"]["content"][0]["top_logprobs"]] == [
        p for _, p in top
    ]


async def test_tokens_of_one_text_do_not_hide_one_another() -> None:
    vocabulary = {"a": 0, "b": 1, "<0x61>": 2, "<0x62>": 3, "c": 4}
    backend = Backend(models.WordLevel(vocabulary, unk_token="a"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    top = ((2, -0.1), (1, -0.2), (3, -0.3), (4, -4.0))
    engine = ScriptedEngine(lambda request: [0], top_logprobs=lambda token_id: top)
    async with serving_with(Tokenizer(backend))(engine) as url:
        answer = (await post(url, PATH, prompt=[1], logprobs=4, max_tokens=1)).json()
    (reported,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert reported == {"token_id:2": -0.1, "b": -0.2, "token_id:3": -0.3, "c": -4.0, "a": -0.5}


async def test_an_engine_that_gives_a_request_up_says_so(serving: Serving) -> None:
    engine = ScriptedEngine(say("ab"), last_reason=FinishReason.ABORT)
    async with serving(engine) as url:
        choice = (await post(url, PATH, prompt="x")).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "abort")


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("options", "usages"),
    [
        ({}, [None, None]),
        ({"include_usage": True}, [None, None, 2]),
        ({"include_usage": True, "continuous_usage_stats": True}, [1, 2, 2]),
        ({"continuous_usage_stats": True}, [None, None]),
    ],
)
async def test_a_stream_reports_counts_when_asked(
    serving: Serving, options: dict[str, bool], usages: list[int | None]
) -> None:
    async with serving(ScriptedEngine(say("ab"))) as url:
        events = events_of(await post(url, PATH, prompt="x", stream=True, stream_options=options))
    reported: list[dict[str, Any] | None] = [event.get("usage") for event in events]
    assert [usage and usage["completion_tokens"] for usage in reported] == usages
    assert (events[-1]["choices"] == []) == ("include_usage" in options)
    assert all(("usage" in event) == ("include_usage" in options) for event in events)


async def test_the_official_client_streams(serving: Serving) -> None:
    async with (
        serving(ScriptedEngine(say(TEXT))) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = await client.completions.create(model="tiny", prompt="x", max_tokens=100)
        chunks = await client.completions.create(model="tiny", prompt="x", max_tokens=100, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in chunks])
        models = await client.models.list()
        model = await client.models.retrieve("tiny")
    assert text == whole.choices[0].text == TEXT
    assert models.data[0].id == model.id == "tiny"
    assert models.data[0].model_dump()["max_model_len"] == 2048


@BESIDE_ITS_ENGINE
async def test_the_official_client_works_without_asyncio(serving: Serving) -> None:
    def complete(url: str) -> str:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return client.completions.create(model="tiny", prompt="x", max_tokens=100).choices[0].text

    async with serving(ScriptedEngine(say(TEXT))) as url:
        assert await asyncio.to_thread(complete, url) == TEXT


@BESIDE_ITS_ENGINE
async def test_a_text_of_any_length_is_encoded_alike(serving: Serving) -> None:
    engine = ScriptedEngine(limits=EngineLimits(2**20, 2**20, 264))
    text = "é" * 9000
    async with serving(engine) as url:
        await post(url, PATH, prompt=text, max_tokens=1)
    assert engine.requests[0].prompt_token_ids == (256, *text.encode())
