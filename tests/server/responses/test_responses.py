import json
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import httpx
import msgspec
import pytest
from http_answers import error_of, post
from listening import BESIDE_ITS_ENGINE, serving_with
from openai import AsyncOpenAI
from scripted_engine import ScriptedEngine, Serving
from template_styles import STYLES
from tokenizers import Tokenizer as Backend

from loong.core.request import FinishReason
from loong.server.answers.responses import Response, ResponseEvent
from loong.server.text.chat_template import ChatTemplate
from loong.server.text.tokenizer import Tokenizer

PATH = "/v1/responses"
EVENT: Any = reduce(or_, ResponseEvent.__subclasses__())
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "日本"}}\n</tool_call>'
BOTH = f"Let me see.\n{CALL}"


def saying(text: str, reason: FinishReason = FinishReason.STOP) -> ScriptedEngine:
    """Return an engine that says a text, and then its end token if it stops."""
    end = [257] if reason is FinishReason.STOP else []
    return ScriptedEngine(lambda _: [*text.encode(), *end], last_reason=reason)


def reported(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream; fails unless each is named by its type, and they are numbered."""
    events = []
    for number, block in enumerate(response.text.strip().split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        msgspec.convert(event, EVENT)
        events.append(event)
    return events


def plain(output: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return what items say, without ids."""
    return [
        ("message", item["content"][0]["text"])
        if item["type"] == "message"
        else ("function_call", item["name"], item["arguments"])
        for item in output
    ]


@BESIDE_ITS_ENGINE
async def test_a_text_is_answered_by_a_message(serving: Serving, tokenizer: Tokenizer) -> None:
    engine = saying("yes")
    async with serving(engine) as url:
        body = {"input": "hi", "instructions": "be nice", "metadata": {"a": "b"}, "temperature": 0.5}
        answer = (await post(url, PATH, model="tiny", **body)).json()
    msgspec.convert(answer, Response)
    prompt = tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|bos|><|system|>be nice<|end|><|user|>hi<|end|><|assistant|>"
    assert engine.requests[0].sampling_params.temperature == 0.5
    assert plain(answer["output"]) == [("message", "yes")]
    assert (answer["status"], answer["store"], answer["metadata"]) == ("completed", False, {"a": "b"})
    assert answer["usage"]["input_tokens"] == len(engine.requests[0].prompt_token_ids)
    assert answer["usage"]["output_tokens"] == 4


@pytest.mark.parametrize(
    ("text", "reason", "status"),
    [
        (BOTH, FinishReason.STOP, "completed"),
        (CALL, FinishReason.STOP, "completed"),
        ("日本, ok", FinishReason.STOP, "completed"),
        (CALL[:-20], FinishReason.LENGTH, "incomplete"),
        (CALL[:-20], FinishReason.STOP, "incomplete"),
        (CALL, FinishReason.LENGTH, "incomplete"),
        ("", FinishReason.STOP, "completed"),
    ],
)
async def test_the_last_event_has_what_the_whole_answer_does(
    serving: Serving, text: str, reason: FinishReason, status: str
) -> None:
    async with serving(saying(text, reason)) as url:
        whole = (await post(url, PATH, input="hi", tools=TOOLS)).json()
        events = reported(await post(url, PATH, input="hi", tools=TOOLS, stream=True))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last["type"] == f"response.{status}"
    assert last["response"]["status"] == whole["status"] == status
    assert plain(last["response"]["output"]) == plain(whole["output"])
    assert last["response"]["usage"] == whole["usage"]
    deltas = ["", *(event["delta"] for event in events if event["type"].endswith(".delta"))]
    done = [event.get("text", event.get("arguments", "")) for event in events if "done" in event["type"]]
    assert "".join(deltas) == "".join(done)


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize("end", [-20, len(CALL)])
async def test_a_call_is_complete_if_it_is_whole(serving: Serving, reason: FinishReason, end: int) -> None:
    async with serving(saying(CALL[:end], reason)) as url:
        answer = (await post(url, PATH, input="hi", tools=TOOLS)).json()
    (item,) = answer["output"]
    assert item["status"] == ("incomplete" if end < 0 else "completed")
    is_at_limit = reason is FinishReason.LENGTH
    assert answer["incomplete_details"] == ({"reason": "max_output_tokens"} if is_at_limit else None)


async def test_events_come_in_order(serving: Serving) -> None:
    async with serving(saying(BOTH)) as url:
        events = reported(await post(url, PATH, input="hi", tools=TOOLS, stream=True))
    types = [event["type"].removeprefix("response.") for event in events]
    short = [name for name, before in zip(types, ["", *types[:-1]], strict=True) if name != before]
    assert short == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed"),
    ]
    items = [event["output_index"] for event in events if "output_index" in event]
    assert items == sorted(items)


@BESIDE_ITS_ENGINE
async def test_the_official_client_streams_and_goes_on_with_a_result(
    serving: Serving, tokenizer: Tokenizer
) -> None:
    engine = saying(BOTH)
    async with (
        serving(engine) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        async with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:  # type: ignore[arg-type]  # as JSON
            first = await stream.get_final_response()
        assert first.output_text == "Let me see."
        call = first.output[1]
        assert call.type == "function_call"
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        items = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output), result]
        second = await client.responses.create(model="tiny", input=items)  # type: ignore[arg-type]
    assert second.status == "completed"
    prompt = tokenizer.decode(engine.requests[1].prompt_token_ids, skip_special_tokens=False)
    results = "<|user|><tool_response>\nrain\n</tool_response><|end|>"
    assert prompt == f"<|bos|><|user|>hi<|end|><|assistant|>{BOTH}<|end|>{results}<|assistant|>"


async def test_a_failure_on_the_way_is_the_last_event(serving: Serving) -> None:
    async with serving(ScriptedEngine(fail_at=2)) as url:
        *_, last = reported(await post(url, PATH, input="hi", stream=True))
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["error"]["message"]


BAD: list[tuple[str, dict[str, object], str]] = [
    ("store", {"store": True}, "nothing is stored"),
    ("background", {"background": True}, "background"),
    ("truncation", {"truncation": "auto"}, "only disabled is supported"),
    ("previous_response_id", {"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
    ("conversation", {"conversation": "conv_1"}, "conversation is not supported"),
    ("prompt", {"prompt": {"id": "p"}}, "prompt is not supported"),
    ("reasoning", {"reasoning": {"effort": "low"}}, "reasoning is not supported"),
    ("include", {"include": ["file_search_call.results"]}, "include.0"),
    ("tools", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ("tools", {"tools": [*TOOLS, *TOOLS]}, "two tools have the name"),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, "none of the tools"),
    ("tool_choice", {"tool_choice": "required"}, "there are no tools"),
    (
        "tools",
        {
            "tools": [{**TOOLS[0], "parameters": {"not": {}}}],
            "tool_choice": "required",
        },
        "tools.0.parameters: the schema has not",
    ),
    ("text", {"text": {"format": {"type": "json_schema", "name": "a"}}}, "schema goes with"),
    (
        "text",
        {"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "text: the schema has not",
    ),
    ("max_output_tokens", {"max_output_tokens": 0}, "max_output_tokens must be"),
    ("max_output_tokens", {"max_output_tokens": 10**6}, "max_output_tokens is 1000000"),
    ("temperature", {"temperature": -1}, "temperature must be"),
    ("metadata", {"metadata": {"a": 1}}, "metadata.a"),
    ("input", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
    ("input", {"input": [{"type": "item_reference", "id": "a"}]}, "input.0"),
    (
        "input",
        {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
        "no earlier item",
    ),
    ("input", {"input": []}, "at least 1 item"),
    ("input", {"input": "a" * 5000}, "the input has"),
]


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize(("param", "body", "message"), BAD)
async def test_bad_input_is_refused_by_the_name_of_its_field(
    serving: Serving, param: str, body: dict[str, object], message: str
) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as url:
        error = await error_of(url, PATH, 400, **{"input": "hi", **body})
    assert error["param"] == param
    assert message in error["message"]
    assert not engine.requests


@BESIDE_ITS_ENGINE
async def test_what_asks_for_nothing_is_taken(serving: Serving) -> None:
    neutral = {"store": False, "background": False, "truncation": "disabled", "include": [], "tools": []}
    neutral |= {"previous_response_id": None, "service_tier": "auto", "reasoning": None}
    async with serving(saying("yes")) as url:
        assert (await post(url, PATH, input="hi", **neutral)).status_code == 200


ASKED = {"role": "user", "content": "Ask?"}
LATE = {"role": "system", "content": "Law."}


@pytest.fixture
def strict(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose template leaves out turns of roles that it does not know."""
    assert tokenizer.folder is not None
    template = ChatTemplate(STYLES["known_roles"], {"eos_token": "</s>"})
    return Tokenizer(Backend.from_file(str(tokenizer.folder / "tokenizer.json")), chat_template=template)


async def test_instructions_are_not_lost_with_a_turn_of_the_developer(strict: Tokenizer) -> None:
    engine = ScriptedEngine()
    turns = [{"role": "developer", "content": "Law."}, {"role": "user", "content": "hi"}]
    async with serving_with(strict)(engine) as url:
        assert (await post(url, PATH, instructions="Rule.", input=turns)).status_code == 200
    prompt = strict.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<|system|>\nRule.\n\nLaw.</s>\n<|user|>\nhi</s>\n<|assistant|>\n"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"instructions": "Rule.", "input": [ASKED, LATE]}, "input.1"),
        ({"input": [ASKED, {"type": "reasoning"}, LATE]}, "input.2"),
        ({"instructions": "Rule.", "input": [{"role": "assistant", "content": "hi"}]}, "instructions"),
    ],
)
async def test_a_turn_that_the_template_leaves_out_has_the_name_of_its_item(
    tokenizer: Tokenizer, body: dict[str, object], field: str
) -> None:
    assert tokenizer.folder is not None
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    backend = Backend.from_file(str(tokenizer.folder / "tokenizer.json"))
    model = Tokenizer(backend, chat_template=ChatTemplate(source, {}))
    async with serving_with(model)(ScriptedEngine()) as url:
        error = await error_of(url, PATH, 400, **body)
    assert error["message"].startswith(f"{field}: the model's chat template leaves this turn")
    assert error["param"] == "input"
