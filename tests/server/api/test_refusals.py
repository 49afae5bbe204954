import asyncio

import httpx
import pytest
from http_answers import JSON_TYPE, error_of, post
from listening import BESIDE_ITS_ENGINE
from raw_http import request_head
from scripted_engine import ScriptedEngine, Serving

from loong.core.errors import EngineStoppedError
from loong.engine.client import EngineLimits

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "5"),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -1),
        ("temperature", True),
        ("top_p", -0.1),
        ("max_tokens", 2.5),
        ("seed", 1e300),
        ("stop_token_ids", [1.5]),
        ("prompt", [1.5]),
        ("prompt", [1.0, "a"]),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a"] * 17),
        ("stop", "a" * 257),
        ("stop", [1]),
        ("stop_token_ids", [264]),
        ("stop_token_ids", ["a"]),
        ("logprobs", 21),
        ("logprobs", True),
        ("stream", "yes"),
        ("prompt", 5),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", ["a", ""]),
        ("prompt", [[]]),
        ("prompt", [True]),
        ("prompt", [1, "a"]),
        ("prompt", [[1], "a"]),
        ("prompt", [[1], [264]]),
        ("prompt", [[1], []]),
        ("prompt", ["a"] * 257),
        ("prompt", {"a": 1}),
        ("prompt", [264]),
        ("prompt", [-1]),
        ("n", 0),
        ("n", 17),
        ("echo", 1),
        ("logit_bias", {"264": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("response_format", {"type": "json"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}),
        ("bad_words", "a"),
        ("bad_words", [""]),
        ("bad_words", ["  "]),
        ("bad_words", ["a"] * 257),
        ("bad_words", ["a" * 256] * 17),  # of too many tokens
        ("allowed_token_ids", []),
        ("allowed_token_ids", [264]),
        ("allowed_token_ids", [1] * 4097),
        ("include_stop_str_in_output", 1),
        ("priority", 17),
        ("slo", {"ttft": 0, "tpot": 1}),
        ("slo", {"ttft": 0}),
        ("slo", {"tpot": -1}),
        ("best_of", 3),
        ("length_penalty", True),  # which equals 1
        ("suffix", "x"),
        ("stream_options", {"include_usage": 1}),
        ("stream_options", {"nonsense": True}),
        ("stream_options", {"include_usage": True}),  # without a stream
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(serving: Serving, field: str, value: object) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        error = await error_of(url, PATH, 400, **{"prompt": "a", field: value})
    assert error["param"] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"role": "a robot", "content": "hi"}]),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        ("messages", [{"role": "user", "content": None}]),
        ("messages", [{"role": "tool", "content": "hi", "tool_call_id": "a"}]),
        ("top_logprobs", 3),
        ("logprobs", 3),
        ("tools", [{"type": "function"}]),
    ],
)
async def test_chats_that_cannot_be_served_are_refused_by_name(
    serving: Serving, field: str, value: object
) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, CHAT, 400, **{"messages": MESSAGES, field: value})
    assert error["param"] == field
    assert field in error["message"]


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        (PATH, "max_token", "max_tokens"),
        (PATH, "maxTokens", "max_tokens"),
        (CHAT, "top-p", "top_p"),
        (CHAT, "message", "messages"),
        (PATH, "messages", None),
    ],
)
async def test_a_field_that_is_nearly_another_is_reported_which(
    serving: Serving, path: str, name: str, meant: str | None
) -> None:
    body = {"prompt": "a"} if path == PATH else {"messages": MESSAGES}
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, path, 400, **body | {name: 1})
    expected = f"{name} is not supported" + ("" if meant is None else f"; did you mean {meant}?")
    assert error["message"] == expected


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be 1 or more, or 0 with echo or prompt_logprobs, but is 0"),
        ({"max_tokens": -1}, "max_tokens must be greater than or equal to 0, but is -1"),
        ({"top_k": 2**64}, "top_k must be less than or equal to 2147483647, but is about 1e19"),
        ({"temperature": True}, "temperature must be a valid number, but is true"),
        ({"stop": [None]}, "stop.0 must be a valid string, but is null"),
        ({"max_tokens": "abc"}, "max_tokens must be a valid integer, but is 'abc'"),
        ({"max_tokens": "9" * 99}, f"max_tokens must be a valid integer, but is '{'9' * 64}...'"),
        ({"seed": {}}, "seed must be a valid integer, but is an object"),
        ({"slo": []}, "slo must be an object, but is a list"),
        ({"logit_bias": 5}, "logit_bias must be an object, but is 5"),
        ({"stop": ["a"] * 17}, "stop must have at most 16 items, but has 17"),
        ({"guided_choice": []}, "guided_choice must have at least 1 item, but has 0"),
        ({"user": "a" * 257}, "user must have at most 256 characters, but has 257"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be less than or equal to 20, but is 21"),
        ({"stream_options": {}}, "stream_options: only requests with stream set to true have them"),
        ({"stream": True, "stream_options": {"stream": True}}, "stream_options.stream is not supported"),
        ({"n": 3, "best_of": 2}, "best_of: 2 is below n, which is 3"),
        ({"best_of": 2}, "best_of: 2 is above n, which is 1"),
        ({"prompt": ["a", ""]}, "prompt[1] is empty"),
        (
            {"logit_bias": {"a": 1, "5": 1, "-1": 1, "264": 1, "05": 1}},
            "logit_bias must be by token ids from 0 to 263, but has 'a', '-1', '264', '05'",
        ),
        ({"logit_bias": {str(n): 1 for n in range(264, 300)}}, "'270', '271' and 28 more"),
    ],
    ids=str,
)
async def test_a_refusal_says_in_plain_words_what_is_wrong(
    serving: Serving, wrong: dict[str, object], message: str
) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, PATH, 400, **{"prompt": "a"} | wrong)
    assert message in error["message"]
    assert not any(words in error["message"] for words in ("Value error", "did you mean", " should "))


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (PATH, {"prompt": "a", "slo": {"ttf": 1, "tpot": 1}}, "slo.ttf is not supported; did you mean ttft?"),
        (PATH, {"prompt": "a", "slo": {"max_token": 1}}, "slo.max_token is not supported"),
        (
            CHAT,
            {
                "messages": MESSAGES,
                "tools": [{"type": "function", "function": {"name": "a", "paramters": {}}}],
            },
            "tools.0.function.paramters is not supported; did you mean parameters?",
        ),
        (
            "/generate",
            {"inputs": "a", "parameters": {"max_tokens": 1}},
            "parameters.max_tokens is not supported; did you mean max_new_tokens?",
        ),
    ],
)
async def test_a_field_of_a_field_that_is_nearly_another_is_reported_which(
    serving: Serving, path: str, body: dict[str, object], message: str
) -> None:
    async with serving(ScriptedEngine()) as url:
        assert (await error_of(url, path, 400, **body))["message"] == message


@BESIDE_ITS_ENGINE
async def test_a_long_name_is_cut_where_it_is_refused(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, PATH, 400, prompt="a", **{"n" * 10_000: 1})
    assert len(error["message"]) < 200


async def test_several_prompts_wait_together_or_not_at_all(serving: Serving) -> None:
    engine = ScriptedEngine(pause_at=0)
    async with serving(engine, max_waiting_requests=2) as url:
        first = asyncio.create_task(post(url, PATH, prompt=["a", "b", "c"]))  # nothing waits before them
        await engine.paused.wait()
        assert (await error_of(url, PATH, 503, prompt=["a", "b"]))["code"] == "queue_full"
        engine.resume.set()
        assert (await first).status_code == 200
        assert (await post(url, PATH, prompt="a")).status_code == 200


@BESIDE_ITS_ENGINE
async def test_a_missing_prompt_is_named(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        assert (await error_of(url, PATH, 400))["param"] == "prompt"
        assert (await error_of(url, CHAT, 400))["param"] == "messages"
        error = await error_of(url, CHAT, 400, messages=[{"role": "user"}])
    assert error["message"] == "messages.0.content is missing"


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("path", "body", "hint"),
    [
        (PATH, {}, ""),
        (PATH, {"messages": MESSAGES}, "; /v1/chat/completions takes messages"),
        (PATH, {"input": "a"}, "; /v1/responses takes input"),
        (CHAT, {"prompt": "a"}, "; /v1/completions takes prompt"),
        ("/v1/responses", {"messages": MESSAGES}, "; /v1/chat/completions takes messages"),
        ("/generate", {"prompt": "a"}, "; /v1/completions takes prompt"),
        ("/generate_stream", {"messages": MESSAGES}, "; /v1/chat/completions takes messages"),
        (PATH, {"inputs": "a"}, "; /generate takes inputs"),
    ],
)
async def test_a_body_of_another_endpoint_is_pointed_there(
    serving: Serving, path: str, body: dict[str, object], hint: str
) -> None:
    async with serving(ScriptedEngine()) as url:
        error = await error_of(url, path, 400, **body)
    assert error["message"] == f"{error['param']} is missing{hint}"


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 1),
        ("best_of", 1),
        ("best_of", None),
        ("echo", False),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
        ("response_format", None),
        ("anything", None),
        ("max_tokens", None),
        ("user", "me"),
        ("metadata", {"a": "b"}),
        ("store", True),
        ("service_tier", "auto"),
        ("bad_words", []),
        ("logits_processors", []),
        ("early_stopping", False),
        ("spaces_between_special_tokens", False),
    ],
)
async def test_fields_that_ask_for_nothing_are_taken(serving: Serving, field: str, value: object) -> None:
    async with serving(ScriptedEngine()) as url:
        assert (await post(url, PATH, **{"prompt": "a", field: value})).status_code == 200


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b'{"prompt": NaN}', b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_refused(serving: Serving, body: bytes) -> None:
    async with serving(ScriptedEngine()) as url, httpx.AsyncClient(timeout=30) as client:
        response = await client.post(url + PATH, content=body, headers=JSON_TYPE)
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


@BESIDE_ITS_ENGINE
async def test_an_unknown_model_is_not_found(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url, httpx.AsyncClient(timeout=30) as client:
        for path, body in ((PATH, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
            error = await error_of(url, path, 404, model="gpt-9", **body)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert len((await error_of(url, PATH, 404, model="m" * 10_000, prompt="a"))["message"]) < 200
        assert (await client.get(f"{url}/v1/models/gpt-9")).json()["error"]["code"] == "model_not_found"


@BESIDE_ITS_ENGINE
async def test_a_best_of_that_is_n_asks_for_nothing(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url:
        answer = (await post(url, PATH, prompt="a", n=2, best_of=2)).json()
    assert len(answer["choices"]) == 2


@BESIDE_ITS_ENGINE
async def test_unknown_paths_and_methods_are_reported_alike(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url, httpx.AsyncClient(timeout=30) as client:
        missing = await client.get(f"{url}/nothing")
        wrong = await client.get(f"{url}{PATH}")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.json()["error"]["message"] == f"{PATH} takes POST, but the method is GET"


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "param", "numbers"),
    [
        (2048, None, "prompt", ["2048 tokens"]),
        (5000, None, "prompt", ["5000 tokens", "2048", "4096"]),
        (5000, 1, "prompt", ["5000 tokens", "2048", "4096"]),
        (2000, 49, "max_tokens", ["2000 tokens", "49", "2049", "2048"]),
        (2000, 4000, "max_tokens", ["2000 tokens", "4000", "6000", "2048", "4096"]),
    ],
)
async def test_what_does_not_fit_is_refused_with_all_its_numbers(
    serving: Serving, num_prompt_tokens: int, max_tokens: int | None, param: str, numbers: list[str]
) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        error = await error_of(url, PATH, 400, prompt=[1] * num_prompt_tokens, max_tokens=max_tokens)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert all(number in error["message"] for number in numbers), error["message"]
    assert not engine.requests


async def test_a_cluster_smaller_than_the_model_bounds_requests_too(serving: Serving) -> None:
    engine = ScriptedEngine(limits=EngineLimits(max_model_len=4096, max_request_kv=100, vocab_size=264))
    async with serving(engine) as url:
        error = await error_of(url, PATH, 400, prompt=[1] * 90, max_tokens=20)
        assert "110" in error["message"]
        assert "100" in error["message"]
        chat = (await post(url, CHAT, messages=MESSAGES, ignore_eos=True)).json()["usage"]
    assert chat["total_tokens"] == 100


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"prompt": "hi"}, "prompt"),
        (CHAT, {"messages": MESSAGES}, "messages"),
        ("/v1/responses", {"input": "hi"}, "input"),
        ("/generate", {"inputs": "hi"}, "inputs"),
    ],
)
async def test_tokens_of_the_tokenizer_that_the_model_does_not_have_are_refused(
    serving: Serving, path: str, fields: dict[str, object], param: str
) -> None:
    engine = ScriptedEngine(limits=EngineLimits(max_model_len=2048, max_request_kv=4096, vocab_size=100))
    async with serving(engine) as url:
        error = await error_of(url, path, 400, **fields)
    assert error["param"] == param
    assert "but ids go from 0 to 99" in error["message"]
    assert not engine.requests


async def test_the_default_length_gives_way_to_the_models(serving: Serving) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        usage = (await post(url, PATH, prompt=[1] * 2040)).json()["usage"]
    assert usage["completion_tokens"] == 8


@BESIDE_ITS_ENGINE
async def test_a_million_token_ids_fit_and_more_bytes_are_too_many(serving: Serving) -> None:
    engine = ScriptedEngine(limits=EngineLimits(2**21, 2**21, 200_000))
    async with serving(engine) as url:
        usage = (await post(url, PATH, prompt=[123456] * 1_000_000, max_tokens=1)).json()["usage"]
    assert usage["prompt_tokens"] == 1_000_000
    async with serving(engine, max_body_bytes=1000) as url:
        error = await error_of(url, PATH, 413, prompt="a" * 2000)
    assert "1000" in error["message"]


async def test_a_server_whose_engine_has_stopped_asks_to_come_back_in_plain_words(serving: Serving) -> None:
    engine = ScriptedEngine(fail_at=0, failure=EngineStoppedError())
    async with serving(engine, retry_after=7) as url:
        answer = await post(url, PATH, prompt="a")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "7")
    error = answer.json()["error"]
    assert error["code"] == "engine_stopped"
    assert error["message"] == str(EngineStoppedError())


async def test_a_full_queue_says_when_to_come_back(serving: Serving) -> None:
    engine = ScriptedEngine(pause_at=0)
    async with serving(engine, max_waiting_requests=1, retry_after=7) as url:
        first = asyncio.create_task(post(url, PATH, prompt="a"))
        await engine.paused.wait()
        refused = await post(url, PATH, prompt="a")
        engine.resume.set()
        assert (await first).status_code == 200
        assert (await post(url, PATH, prompt="a")).status_code == 200
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "7")
    assert refused.json()["error"]["code"] == "queue_full"


async def test_waiting_tokens_are_bounded_but_one_prompt_may_pass(serving: Serving) -> None:
    engine = ScriptedEngine(pause_at=0)
    async with serving(engine, max_waiting_tokens=10) as url:
        first = asyncio.create_task(post(url, PATH, prompt=[1] * 50))
        await engine.paused.wait()
        refused = await error_of(url, PATH, 503, prompt=[1] * 3)
        engine.resume.set()
        assert (await first).status_code == 200
    assert all(number in refused["message"] for number in ("50", "3", "10"))


async def test_requests_that_have_a_token_wait_no_more(serving: Serving) -> None:
    engine = ScriptedEngine(pause_at=1)
    async with serving(engine, max_waiting_requests=1) as url:
        first = asyncio.create_task(post(url, PATH, prompt="a"))
        await engine.paused.wait()
        assert (await post(url, PATH, prompt="a", max_tokens=1)).status_code == 200
        engine.resume.set()
        await first


async def test_a_key_guards_all_but_the_probes(serving: Serving) -> None:
    async with (
        serving(ScriptedEngine(), api_keys=("secret", "second")) as url,
        httpx.AsyncClient(timeout=30) as client,
    ):
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert (await client.get(url + path)).status_code == 200
        for path in ("/v1/models", "/load", "/trace"):
            assert (await client.get(url + path)).status_code == 401
        for header in (b"Bearer wrong", b"Bearer", b"secret", b"Basic secret", b"Bearer \xff"):
            headers = {b"Authorization": header}
            response = await client.post(url + PATH, json={"prompt": "a"}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("secret", "second"):
            known = {"Authorization": f"Bearer {key}"}
            assert (await client.post(url + PATH, json={"prompt": "a"}, headers=known)).status_code == 200


async def test_several_keys_are_distinguished_and_each_is_bounded(serving: Serving) -> None:
    engine = ScriptedEngine(pause_at=0)
    settings = {"api_keys": ("one", "two"), "max_requests_per_key": 1, "retry_after": 3}

    async def ask(key: str, prompt: object = "a") -> httpx.Response:
        async with httpx.AsyncClient(timeout=30) as client:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.post(url + PATH, json={"prompt": prompt, "user": "me"}, headers=headers)

    async with serving(engine, **settings) as url:
        first = asyncio.create_task(ask("one"))
        await engine.paused.wait()
        refused = await ask("one")
        second = asyncio.create_task(ask("two"))
        engine.resume.set()
        assert [(await answer).status_code for answer in (first, second)] == [200, 200]
        assert (await ask("one")).status_code == 200
        assert (await ask("one", ["a", "b"])).status_code == 400  # to come back would not help
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "3")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert [request.user for request in engine.requests] == ["key 0", "key 1", "key 0"]


@BESIDE_ITS_ENGINE
async def test_a_body_that_does_not_come_is_given_up(serving: Serving) -> None:
    async with serving(ScriptedEngine(), body_timeout=0.05) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request_head(PATH, "Content-Length: 100") + b"{")
        status_line = await reader.readline()
        writer.close()
        await writer.wait_closed()
    assert b" 408 " in status_line
