"""Chat templates see what Hugging Face gives to them."""

import json
from pathlib import Path

import pytest
from chat_texts import chat_text

from loong.core.errors import ConfigError
from loong.server.text.chat_template import ChatTemplate, read_chat_templates

HI = [{"role": "user", "content": "hi"}]


def test_a_template_sees_messages_special_tokens_and_variables() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ mood }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert chat_text(template, HI, variables={"mood": "!"}) == "<s>hiTrue!"


def test_blocks_leave_no_blank_lines() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", {}
    )
    assert chat_text(template, HI) == "user\n"


def test_json_is_written_as_it_is_read() -> None:
    assert chat_text(ChatTemplate("{{ messages | tojson }}", {}), [{"a": "é<"}]) == '[{"a": "é<"}]'
    assert chat_text(ChatTemplate("{{ messages | tojson(indent=2) }}", {}), []) == "[]"


@pytest.mark.parametrize("number", [10**30, -(2**63) - 1, 1e308, 1.0])
def test_numbers_keep_their_digits(number: float) -> None:
    assert json.loads(chat_text(ChatTemplate("{{ messages | tojson }}", {}), [{"a": number}])) == [
        {"a": number}
    ]


def test_a_template_that_knows_tools_is_given_them() -> None:
    template = ChatTemplate("{% if tools is defined and tools %}{{ tools | tojson }}{% endif %}", {})
    assert template.knows_tools
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1.0, 1e16, True]}}}]
    assert chat_text(template, HI, tools=tools) == json.dumps(tools, ensure_ascii=False)
    assert chat_text(template, HI) == ""
    assert not ChatTemplate("These tools are words.", {}).knows_tools


def test_json_has_the_parameters_that_it_has_in_transformers() -> None:
    source = "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ 'é' | tojson(true) }}"
    assert chat_text(ChatTemplate(source, {}), [{"b": 1, "a": 2}]) == '[{"a":2,"b":1}]"\\u00e9"'


def test_a_block_for_trainings_is_plain_text() -> None:
    source = "{% generation %}{% set a = 1 %}{{ messages[0].content }}{% endgeneration %}{{ a is defined }}"
    assert chat_text(ChatTemplate(source, {}), HI) == "hiFalse"


def _texts(folder: Path, config: dict[str, object]) -> list[str | None]:
    templates = read_chat_templates(folder, config, {})
    return [None if template is None else template.source for template in templates]


def test_files_of_templates_go_before_those_of_the_config(tmp_path: Path) -> None:
    named = [
        {"name": "rag", "template": "c"},
        {"name": "tool_use", "template": "b"},
        1,
        {},
        {"name": ["default"]},
    ]
    assert _texts(tmp_path, {}) == [None, None]
    assert _texts(tmp_path, {"chat_template": "a"}) == ["a", None]
    assert _texts(tmp_path, {"chat_template": [*named, {"name": "default", "template": "a"}]}) == ["a", "b"]
    assert _texts(tmp_path, {"chat_template": named}) == [None, "b"]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("B")
    assert _texts(tmp_path, {"chat_template": "a"}) == ["a", "B"]
    (tmp_path / "chat_template.jinja").write_text("A")
    assert _texts(tmp_path, {"chat_template": named}) == ["A", "B"]
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").unlink()
    assert _texts(tmp_path, {"chat_template": named}) == ["A", None]


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read: 'utf-8' codec"):
        read_chat_templates(tmp_path, {}, {})
