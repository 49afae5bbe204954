import json

import pytest

from loong.core.errors import ConfigError, InvalidRequestError
from loong.server.text import chat_template
from loong.server.text.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def test_a_template_sees_messages_special_tokens_and_variables() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}{{ mood }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(HI, variables={"mood": "!"}) == "<s>hiTrue!"


def test_blocks_leave_no_blank_lines() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", {}
    )
    assert template.render(HI) == "user\n"


def test_json_is_written_as_it_is_read() -> None:
    assert ChatTemplate("{{ messages | tojson }}", {}).render([{"a": "é<"}]) == '[{"a": "é<"}]'
    assert ChatTemplate("{{ messages | tojson(indent=2) }}", {}).render([]) == "[]"


def test_a_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="roles must alternate") as refusal:
        template.render(HI)
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0]['content'].__init__.__globals__ }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ 'a' * 10**9 }}",
        "{{ 9999 ** 9999 ** 9999 }}",
    ],
)
def test_a_template_can_do_no_harm(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source, {}).render(HI)


def test_a_template_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="more than"):
        ChatTemplate(source, {}).render(HI)


def test_a_broken_template_is_the_operators_error() -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_a_template_that_knows_tools_is_given_them() -> None:
    template = ChatTemplate("{% if tools is defined and tools %}{{ tools | tojson }}{% endif %}", {})
    assert template.knows_tools
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1.0, 1e16, True]}}}]
    assert template.render(HI, tools=tools) == json.dumps(tools, ensure_ascii=False)
    assert template.render(HI) == ""
    assert not ChatTemplate("These tools are words.", {}).knows_tools


def test_json_has_the_parameters_that_it_has_in_transformers() -> None:
    source = "{{ messages | tojson(separators=(',', ':'), sort_keys=true) }}{{ 'é' | tojson(true) }}"
    assert ChatTemplate(source, {}).render([{"b": 1, "a": 2}]) == '[{"a":2,"b":1}]"\\u00e9"'
