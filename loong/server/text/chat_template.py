"""Chat templates of model folders. Text is rendered elsewhere, by a `ChatRenderer`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import TemplateError
from jinja2.nodes import Const, Name

from loong.core.errors import ConfigError
from loong.server.text.template_sandbox import environment

MAX_BYTES = 2**17  # so that parsing, which nothing else bounds, is a matter of seconds
_DEFAULT, _TOOL_USE = "default", "tool_use"


class ChatTemplate:
    """A template, with the names that Hugging Face gives to it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Parse `source`. Raises `ConfigError` if it is not a template."""
        if (num_bytes := len(source.encode())) > MAX_BYTES:
            many = f"{num_bytes} bytes or more, but at most {MAX_BYTES} are allowed"
            raise ConfigError(f"the model's chat template has {many}")
        try:
            tree = environment().parse(source)
            names = {name.name for name in tree.find_all(Name)}
            constants = [const.value for const in tree.find_all(Const)]
        except (TemplateError, ValueError, RecursionError) as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self.source = source
        self.knows_tools = "tools" in names
        self._texts = frozenset(value for value in constants if isinstance(value, str))
        self._special_tokens = dict(special_tokens)

    def names(self, text: str) -> bool:
        """Return whether the template compares a value with this text, or writes the text."""
        return text in self._texts

    def request(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> bytes:
        """Return what a renderer needs to write the prompt of messages, for a model that may call `tools`."""
        names = {**self._special_tokens, "tools": None, "documents": None, **(variables or {})}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        if tools is not None:
            names["tools"] = tools
        return _encoded({"source": self.source, "names": names})

    def compile_request(self) -> bytes:
        """Return what a renderer needs to compile the template alone."""
        return _encoded({"source": self.source, "names": None})


def read_chat_templates(
    folder: Path, config: Mapping[str, object], special_tokens: Mapping[str, str]
) -> tuple[ChatTemplate | None, ChatTemplate | None]:
    """Return a model's template, and the one for chats with tools if there is another.

    Files of the folder go before the template, or the named templates, in tokenizer_config.json.
    """
    given = config.get("chat_template")
    sources: dict[str, object] = {_DEFAULT: given}
    if isinstance(given, list):
        sources = {str(item.get("name")): item.get("template") for item in given if isinstance(item, dict)}
    path = folder / "chat_template.jinja"
    if path.is_file():
        sources = {_DEFAULT: _text_of(path)}
    path = folder / "additional_chat_templates" / f"{_TOOL_USE}.jinja"
    if path.is_file():
        sources[_TOOL_USE] = _text_of(path)
    default, tool_use = (
        ChatTemplate(source, special_tokens) if isinstance(source := sources.get(name), str) else None
        for name in (_DEFAULT, _TOOL_USE)
    )
    return default, tool_use


def _text_of(path: Path) -> str:
    """Return a template's text, or enough of it to refuse it."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_BYTES + 1)
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _encoded(request: Mapping[str, object]) -> bytes:
    return json.dumps(request, ensure_ascii=False).encode()
