"""Chat templates: a model's own Jinja, in a sandbox, turns messages into a prompt."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Never

import msgspec
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loong.core.errors import ConfigError, InvalidRequestError


class ChatTemplate:
    """A compiled template, with the names Hugging Face gives it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; raise `ConfigError` if it is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for `messages`; raise `InvalidRequestError` if the template refuses them."""
        names = {**self._special_tokens, "tools": None, "documents": None, **(variables or {})}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequestError(message, param="messages") from error


def _refuse(message: str) -> Never:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(value: object, indent: int | None = None) -> str:
    """JSON as templates write it: characters as they are, a blank after commas and colons."""
    encoded = msgspec.json.encode(value)
    return msgspec.json.format(encoded, indent=0 if indent is None else indent).decode()
