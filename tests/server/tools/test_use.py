import json

import pytest

from loong.server.api.errors import ApiError
from loong.server.api.parsing import check
from loong.server.openai.schemas import ChatFields
from loong.server.tools.formats import LLAMA3
from loong.server.tools.use import tool_use

MESSAGES = [{"role": "user", "content": "hi"}]
CLOSED = {"additionalProperties": False, "type": "object"}


def forced(parameters: dict[str, object]) -> ChatFields:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return check({"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}, ChatFields)


@pytest.mark.parametrize(
    ("parameters", "held_to"),
    [
        ({}, CLOSED),
        ({"type": "object", "properties": {}}, {**CLOSED, "properties": {}}),
        ({"type": "object", "additionalProperties": True}, {"type": "object", "additionalProperties": True}),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, None),
    ],
)
def test_arguments_of_a_forced_call_are_held_to_the_schema_of_the_tool(
    parameters: dict[str, object], held_to: dict[str, object] | None
) -> None:
    use = tool_use(forced(parameters), LLAMA3)
    assert use is not None
    answer = json.loads(use.grammar().text)["format"]
    (call,) = answer["elements"][0]["elements"]
    assert call["content"]["json_schema"] == (held_to or parameters)


def test_without_a_format_that_is_known_tools_are_refused() -> None:
    with pytest.raises(ApiError, match="--tool-call-parser names one of hermes") as refused:
        tool_use(forced({}), None)
    assert refused.value.param == "tools"
