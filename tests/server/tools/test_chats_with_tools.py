import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec
import pytest
from http_answers import error_of, events_of, get_json, post
from listening import BESIDE_ITS_ENGINE
from openai import AsyncOpenAI
from scripted_engine import ScriptedEngine, Serving

from loong.core.request import FinishReason, NewRequest
from loong.server.answers.chats import ChatCompletion, ChatCompletionChunk
from loong.server.text.tokenizer import Tokenizer
from loong.server.tools.fields import MAX_TOOLS, MAX_TOOLS_BYTES

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "日本"}}\n</tool_call>'
BOTH = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}


def saying(text: str, reason: FinishReason = FinishReason.STOP) -> ScriptedEngine:
    """Return an engine that says a text, and then its end token if it stops."""
    end = [257] if reason is FinishReason.STOP else []
    return ScriptedEngine(lambda _: [*text.encode(), *end], last_reason=reason)


def called(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]


def put_together(events: Sequence[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str | None]:
    """Return the message of one choice in a stream, and why it ends."""
    message: dict[str, Any] = {"content": None}
    reason = None
    for choice in (choice for event in events for choice in event["choices"] if choice["index"] == index):
        delta = choice["delta"]
        assert reason is None
        reason = choice["finish_reason"]
        message["role"] = delta.get("role", message.get("role"))
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["function"]["arguments"] == ""
                calls.append({**call, "function": {**call["function"]}})
            else:
                assert call.keys() == {"index", "function"}
                assert call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


@BESIDE_ITS_ENGINE
async def test_calls_are_reported_and_not_as_text(serving: Serving) -> None:
    async with serving(saying(BOTH)) as url:
        answer = (await post(url, PATH, messages=MESSAGES, tools=TOOLS)).json()
    msgspec.convert(answer, ChatCompletion)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["role"], message["content"]) == ("assistant", "Let me see.")
    assert called(message) == [("weather", '{"city": "日本"}'), ("now", "{}")]
    assert choice["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert {call["type"] for call in message["tool_calls"]} == {"function"}


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(
    ("stop", "reason"),
    [
        ('"city', "stop"),
        ("日", "stop"),
        ("本", "stop"),
        ('"}', "stop"),
        ("}\n<", "stop"),  # only the bracket of the call is missing
        ("\n</tool", "tool_calls"),
        ("</tool_call>", "tool_calls"),
        ("now", "tool_calls"),  # the second call is text
        ('nothing"', "tool_calls"),
        ('"arguments": {}', "tool_calls"),
        ("<tool", "stop"),
        ("see", "stop"),
    ],
)
async def test_a_stop_string_inside_a_call_does_not_complete_it(
    serving: Serving, stop: str, reason: str
) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "stop": stop}
    async with serving(saying(BOTH)) as url:
        (whole,) = (await post(url, PATH, **body)).json()["choices"]
        events = events_of(await post(url, PATH, stream=True, **body))
    assert whole["finish_reason"] == reason
    assert whole["stop_reason"] == (stop if stop in BOTH else None)
    message, finish_reason = put_together(events)
    assert finish_reason == reason
    assert called(message) == called(whole["message"])


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_an_end_inside_a_call_does_not_complete_it(serving: Serving, choice: object) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "n": 2}
    for end, reason in ((-20, "stop"), (len(CALL), "tool_calls")):
        async with serving(saying(CALL[:end])) as url:
            answer = (await post(url, PATH, **body)).json()
        assert [choice["finish_reason"] for choice in answer["choices"]] == [reason] * 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOTH, FinishReason.STOP),
        (CALL, FinishReason.STOP),
        (CALL[:-20], FinishReason.LENGTH),
        (CALL[:12], FinishReason.LENGTH),
        (CALL[:-20], FinishReason.STOP),
        (CALL[:12], FinishReason.STOP),
        ("No call is needed. \n", FinishReason.STOP),
        (CALL.replace("weather", "unknown"), FinishReason.STOP),
    ],
)
@pytest.mark.parametrize("more", [{}, {"logprobs": True, "return_token_ids": True}], ids=["brief", "all"])
async def test_a_stream_reports_what_the_whole_answer_does(
    serving: Serving, text: str, reason: FinishReason, more: dict[str, object]
) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, **more}
    async with serving(saying(text, reason)) as url:
        whole = (await post(url, PATH, **body)).json()["choices"][0]
        events = events_of(await post(url, PATH, stream=True, **body))
    for event in events:
        msgspec.convert(event, ChatCompletionChunk)
    message, finish_reason = put_together(events)
    assert (message["content"], called(message)) == (whole["message"]["content"], called(whole["message"]))
    assert finish_reason == whole["finish_reason"]
    assert ("tool_calls" in message) == ("tool_calls" in whole["message"])
    if more:
        choices = [choice for event in events for choice in event["choices"]]
        reported_ids = chain.from_iterable(choice.get("token_ids", []) for choice in choices)
        assert [*reported_ids] == whole["token_ids"]
        reported = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"] is not None]
        assert [*chain.from_iterable(reported)] == whole["logprobs"]["content"]


@BESIDE_ITS_ENGINE
async def test_the_official_client_puts_a_stream_together(serving: Serving) -> None:
    async with (
        serving(saying(BOTH)) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS) as stream,  # type: ignore[arg-type]  # as JSON
    ):
        completion = await stream.get_final_completion()
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert found == [("weather", '{"city": "日本"}'), ("now", "{}")]


@BESIDE_ITS_ENGINE
async def test_each_choice_has_calls_of_its_own(serving: Serving) -> None:
    def reply(request: NewRequest) -> Sequence[int]:
        return [*(CALL if request.sampling_params.seed == 7 else "no").encode(), 257]

    async with serving(ScriptedEngine(reply)) as url:
        body = {"messages": MESSAGES, "tools": TOOLS, "n": 2, "seed": 7}
        whole = (await post(url, PATH, **body)).json()["choices"]
        events = events_of(await post(url, PATH, stream=True, **body))
    for choice, reason in zip(whole, ("tool_calls", "stop"), strict=True):
        message, finish_reason = put_together(events, choice["index"])
        assert finish_reason == choice["finish_reason"] == reason
        assert called(message) == called(choice["message"])


async def test_without_parallel_calls_the_first_one_ends_the_request(serving: Serving) -> None:
    engine = saying(BOTH)
    async with serving(engine) as url:
        body = {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False}
        (choice,) = (await post(url, PATH, **body)).json()["choices"]
    assert called(choice["message"]) == [("weather", '{"city": "日本"}')]
    assert choice["finish_reason"] == "tool_calls"
    assert list(engine.abort_reasons.values()) == [FinishReason.STOP]


@BESIDE_ITS_ENGINE
async def test_where_no_call_may_be_nothing_is_read_or_reported_tools(
    serving: Serving, tokenizer: Tokenizer
) -> None:
    engine = saying(CALL)
    async with serving(engine) as url:
        body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}
        (choice,) = (await post(url, PATH, **body)).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL}
    prompt = tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|bos|><|user|>hi<|end|><|assistant|>"


@BESIDE_ITS_ENGINE
async def test_calls_and_results_go_back_to_the_model(serving: Serving, tokenizer: Tokenizer) -> None:
    engine = saying(BOTH)
    async with serving(engine) as url:
        first = (await post(url, PATH, messages=MESSAGES, tools=TOOLS)).json()["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{i}<|end|>"}
            for i, call in enumerate(first["tool_calls"])
        ]
        body = {"messages": [*MESSAGES, first, *results], "tools": TOOLS}
        assert (await post(url, PATH, **body)).status_code == 200
        counted = (await post(url, "/tokenize", **body)).json()["count"]
    prompt_ids = engine.requests[1].prompt_token_ids
    assert counted == len(prompt_ids)
    system, _, rest = tokenizer.decode(prompt_ids, skip_special_tokens=False).partition("<|user|>hi<|end|>")
    listed = system[system.index("<tools>") : system.index("</tools>")].split("\n")[1:-1]
    assert [json.loads(tool)["function"]["name"] for tool in listed] == ["weather", "now"]
    assert json.loads(listed[0]) == TOOLS[0]
    results_reported = "\n".join(f"<tool_response>\n{i}<|end|>\n</tool_response>" for i in range(2))
    assert rest == f"<|assistant|>{BOTH}<|end|><|user|>{results_reported}<|end|><|assistant|>"
    assert prompt_ids.count(259) == 4  # the ends of turns: those in results are text


async def test_a_forced_call_is_held_to_the_schemas(serving: Serving) -> None:
    engine = saying(CALL)
    async with serving(engine) as url:
        for choice in ("required", NAMED):
            body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
            response = await post(url, PATH, **body)
            assert response.status_code == 200, response.text
            (answer,) = response.json()["choices"]
            assert called(answer["message"]) == [("weather", '{"city": "日本"}')]
    required, named = (request.sampling_params.grammar for request in engine.requests)
    assert required is not None
    assert named is not None
    assert ('"now"' in required.text.replace("\\", ""), '"now"' in named.text.replace("\\", "")) == (
        True,
        False,
    )


def function(name: str, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **more}}


TURN = {"role": "assistant", "content": None}
BAD: list[tuple[str, dict[str, object], str]] = [
    ("tools", {"tools": [{"type": "web_search"}]}, "tools.0.type must be 'function'"),
    ("tools", {"tools": [function("a b")]}, "tools.0.function.name"),
    ("tools", {"tools": [function("f"), function("f")]}, "two tools have the name 'f'"),
    ("tools", {"tools": [function("f", parameters={"type": "array"})]}, "tools.0.function.parameters"),
    ("tools", {"tools": [function("f", code="x")]}, "tools.0.function.code is not supported"),
    ("tools", {"tools": [function(f"f{i}") for i in range(MAX_TOOLS + 1)]}, f"at most {MAX_TOOLS} items"),
    (
        "tools",
        {"tools": [function("f", description="x" * MAX_TOOLS_BYTES)]},
        f"at most {MAX_TOOLS_BYTES} are allowed",
    ),
    (
        "tools",
        {"tools": [function("f", parameters={"not": {}})], "tool_choice": "required"},
        "tools.0.function.parameters: the schema has not",
    ),
    ("tool_choice", {"tool_choice": "required"}, "there are no tools"),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}, "must be 'none', 'auto', 'required'"),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "g"}}}, "'g' is none of"),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function"}}, "goes with the type function"),
    ("parallel_tool_calls", {"parallel_tool_calls": 1}, "parallel_tool_calls must be"),
    ("functions", {"functions": [{"name": "f"}]}, "functions is not supported"),
    (
        "response_format",
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format cannot be used with",
    ),
    (
        "ignore_eos",
        {"tools": TOOLS, "tool_choice": "required", "ignore_eos": True},
        "ignore_eos cannot be used with tool_choice",
    ),
    ("messages", {"messages": [{"role": "tool", "content": "1"}]}, "messages.0: tool_call_id goes with"),
    (
        "messages",
        {"messages": [{"role": "tool", "content": "1", "tool_call_id": "a"}]},
        "messages: 0.tool_call_id is 'a', but no earlier message",
    ),
    (
        "messages",
        {"messages": [{**TURN, "tool_calls": [{"id": "a", **function("f", arguments="[1]")}]}]},
        "messages.0.tool_calls.0.function.arguments",
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": "a", "tool_calls": [{"id": "a", **function("f")}]}]},
        "messages.0: tool_calls go with the role assistant",
    ),
    ("messages", {"messages": [{"role": "b s", "content": "a"}]}, "messages.0.role"),
    ("messages", {"messages": [{"role": "eos", "content": "a"}]}, "a part of a special token"),
]


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(("param", "body", "message"), BAD)
async def test_bad_input_is_refused_by_the_name_of_its_field(
    serving: Serving, param: str, body: dict[str, object], message: str
) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        error = await error_of(url, PATH, 400, **{"messages": MESSAGES, **body})
    assert error["param"] == param
    assert message in error["message"]
    assert not engine.requests


@BESIDE_ITS_ENGINE
async def test_a_role_of_any_name_goes_to_the_template(serving: Serving, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        await post(url, PATH, messages=[{"role": "critic", "content": "bad"}], max_tokens=1)
        assert "/v1/chat/completions" in (await get_json(url, "/openapi.json"))["paths"]
    prompt = tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|bos|><|critic|>bad<|end|><|assistant|>"
