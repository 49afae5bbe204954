import pytest

from loong.core.errors import ConfigError
from loong.server.text.chat_template import ChatTemplate
from loong.server.tools.formats import FORMATS, HERMES, choose_format

LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
CHOSEN = {
    "<tool_call>{{ tools }}": "hermes",
    "[TOOL_CALLS]{{ tools }}": "mistral",
    "<|python_tag|>{{ tools }}": "llama3_json",
    '<|start_header_id|>{"name": function name, "parameters": dictionary}{{ tools }}': "llama3_json",
    "We speak of tools.": "hermes",
    "<tool_call><function={{ tools }}>": None,
    "<|calls|>{{ tools }}": None,
}


@pytest.mark.parametrize(("source", "name"), CHOSEN.items())
def test_a_format_goes_with_a_template(source: str, name: str | None) -> None:
    form = choose_format(ChatTemplate(source + LOOP, {}), None)
    assert (None if form is None else form.name) == name


@pytest.mark.parametrize("name", FORMATS)
def test_a_parser_by_name_wins_where_the_template_knows_tools(name: str) -> None:
    form = choose_format(ChatTemplate(TOOLS + LOOP, {}), name)
    assert form is FORMATS[name]


def test_a_template_without_tools_goes_with_hermes_alone() -> None:
    plain = ChatTemplate(LOOP, {})
    assert choose_format(plain, None) is choose_format(plain, "hermes") is choose_format(None, None) is HERMES
    with pytest.raises(ConfigError, match="--tool-call-parser mistral does not go with"):
        choose_format(plain, "mistral")
