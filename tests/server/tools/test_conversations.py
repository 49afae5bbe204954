"""The tools that models with templates of their own receive."""

import json
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer as Backend

from loong.core.errors import InvalidRequestError
from loong.server.api.errors import ApiError
from loong.server.api.parsing import check
from loong.server.openai.chat_prompts import ChatPrompts
from loong.server.openai.schemas import ChatFields
from loong.server.text.chat_template import ChatTemplate
from loong.server.text.tokenizer import Tokenizer

TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{% if m.role != 'silent' %}{{ m | tojson }}\n{% endif %}{% endfor %}"
)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "<|end|>"]}'}}
MESSAGES: Sequence[dict[str, object]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "name": "f", "content": "1"},
]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"<|eos|>": {"type": "integer"}}}}


async def written(tokenizer: Tokenizer, source: str, **body: object) -> tuple[str, Sequence[int]]:
    """Return the prompt of a chat by a template, as text and as ids."""
    template = ChatTemplate(source, {})
    assert tokenizer.folder is not None
    backend = Backend.from_file(str(tokenizer.folder / "tokenizer.json"))
    model = Tokenizer(backend, chat_template=template)
    prompts = ChatPrompts(model)
    try:
        ids = await prompts.token_ids(check(body, ChatFields))
    finally:
        await prompts.close()
    return await model.text(ids), ids


async def test_a_template_gets_tools_calls_with_objects_and_results(tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": TOOL}]
    text, ids = await written(tokenizer, TOOL_TEMPLATE, messages=MESSAGES, tools=tools)
    offered, _, call, result = map(json.loads, text.splitlines())
    assert offered == tools
    assert call["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "<|end|>"]}}}
    ]
    assert result == {"role": "tool", "content": "1", "name": "f", "tool_call_id": "a"}
    assert max(ids) < 256  # special tokens in names and values are text


@pytest.mark.parametrize("role", ["silent", "refused"])
async def test_a_role_that_a_template_does_not_take_is_refused(tokenizer: Tokenizer, role: str) -> None:
    source = TOOL_TEMPLATE + "{% if messages[-1].role == 'refused' %}{{ raise_exception('no') }}{% endif %}"
    messages = [MESSAGES[0], {"role": role, "content": "hm"}]
    with pytest.raises((ApiError, InvalidRequestError), match=r"leaves this turn|refuses these messages"):
        await written(tokenizer, source, messages=messages)


async def test_a_role_of_a_special_token_is_taken_where_the_template_names_it(tokenizer: Tokenizer) -> None:
    messages = [{"role": "eos", "content": "hm"}]
    with pytest.raises(ApiError, match="a part of a special token"):
        await written(tokenizer, TOOL_TEMPLATE, messages=messages)
    text, _ = await written(tokenizer, TOOL_TEMPLATE + "{% set own = 'eos' %}", messages=messages)
    assert "hm" in text
