"""Requests of several kinds of clients, against the tiny model on two instances."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openai.types.chat import ChatCompletionMessage
from served import Served, served

NAMES = ("--served-model-name", "loong-tiny", "gpt", "--accept-any-model")
PARAMETERS = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["happy", "sad"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["mood", "stars"],
}
TOOLS = [
    {"type": "function", "function": {"name": "rate", "description": "Rates.", "parameters": PARAMETERS}}
]
MESSAGES = [{"role": "user", "content": "Rate it."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("clients"), "--num-instances", "2", *NAMES) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_regex": r"\d{3}-[a-c]{1,4}"}, r"\d{3}-[a-c]{1,4}"),
        ({"guided_choice": ["yes", "no\n", '"']}, 'yes|no\n|"'),
        ({"guided_json": {"enum": [17, "a"]}}, '17|"a"'),
        ({"guided_grammar": 'root ::= "<" [0-9]{2} ">"'}, r"<\d{2}>"),
        ({"guided_grammar": 'start: "<" /[0-9]/ ">"'}, r"<\d>"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"regex": "x{5}"}}, "x{5}"),
    ],
)
def test_answers_follow_grammars_in_vllms_notations(
    server: Served, asked: Mapping[str, object], pattern: str
) -> None:
    pytest.importorskip("xgrammar")
    answer = server.client.chat.completions.create(
        model="loong-tiny",
        messages=[{"role": "user", "content": "hi"}],
        n=2,
        extra_body=asked,
    )
    assert all(re.fullmatch(pattern, choice.message.content or "") for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_lightllms_endpoints_continue_a_text_as_completions_do(server: Served) -> None:
    completion = server.client.completions.create(
        model="loong-tiny", prompt="hello", max_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    parameters = {"do_sample": False, "ignore_eos": True, "max_new_tokens": 9}
    asked = {"inputs": "hello", "parameters": parameters}
    whole = httpx.post(f"{server.url}/generate", json=asked, timeout=60).json()
    streamed = httpx.post(f"{server.url}/generate_stream", json=asked, timeout=60).text
    events = [json.loads(line.removeprefix("data:")) for line in streamed.split("\n") if line]
    text = completion.choices[0].text
    assert whole["generated_text"] == [text]
    assert "".join(event["token"]["text"] for event in events) == text
    assert len(events) == whole["count_output_tokens"] == 9


def test_any_name_of_a_model_is_answered_and_prompts_are_cut(server: Served) -> None:
    assert [model.id for model in server.client.models.list()] == ["loong-tiny", "gpt"]
    for name in ("gpt", "another"):
        answer = server.client.completions.create(
            model=name, prompt="hello", max_tokens=1, extra_body={"truncate_prompt_tokens": 2}
        )
        assert answer.model == name
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 2


def calls_of(message: ChatCompletionMessage) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]  # type: ignore[union-attr]  # functions alone


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "rate"}}])
def test_a_forced_call_is_of_the_schema_streamed_or_not(server: Served, choice: object) -> None:
    pytest.importorskip("xgrammar")
    body: dict[str, Any] = {
        "model": "loong-tiny",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 3,
        "n": 2,
    }
    whole = server.client.chat.completions.create(**body)
    with server.client.chat.completions.stream(**body) as stream:
        reported = stream.get_final_completion()
    assert len(whole.choices) == 2
    for choices in zip(whole.choices, reported.choices, strict=True):
        assert calls_of(choices[0].message) == calls_of(choices[1].message)
        ((name, arguments),) = calls_of(choices[0].message)
        assert name == "rate"
        jsonschema_rs.validate(PARAMETERS, json.loads(arguments))
        assert [choice.finish_reason for choice in choices] == ["tool_calls", "tool_calls"]


def test_results_are_taken_and_free_answers_are_as_without_a_stream(server: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "rate", "arguments": '{"stars": 1}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    body: dict[str, Any] = {
        "model": "loong-tiny",
        "messages": history,
        "tools": TOOLS,
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = server.client.chat.completions.create(**body)
    stream = server.client.chat.completions.create(**body, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    assert "parser hermes (for a chat template without tools" in server.log


def test_a_response_calls_a_tool_and_writes_json_of_a_schema(server: Served) -> None:
    pytest.importorskip("xgrammar")
    tool = {"type": "function", "name": "rate", "parameters": PARAMETERS}
    body: dict[str, Any] = {
        "model": "loong-tiny",
        "input": "Rate it.",
        "max_output_tokens": 300,
        "temperature": 0,
    }
    forced: dict[str, Any] = {
        **body,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    whole = server.client.responses.create(**forced)
    with server.client.responses.stream(**forced) as stream:
        reported = stream.get_final_response()
    for response in (whole, reported):
        (call,) = (item.to_dict() for item in response.output)
        assert (call["type"], call["name"], response.status) == ("function_call", "rate", "completed")
        jsonschema_rs.validate(PARAMETERS, json.loads(str(call["arguments"])))
    text = {"format": {"type": "json_schema", "name": "rating", "schema": PARAMETERS}}
    written = server.client.responses.create(**{**body, "text": text})
    jsonschema_rs.validate(PARAMETERS, json.loads(written.output_text))
    assert not written.store
