"""Chat templates: a model's own Jinja, in a sandbox, turns messages into a prompt."""

import json
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Never

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.nodes import Const, Name
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loong.core.errors import ConfigError, InvalidRequestError

MAX_SECONDS = 5.0  # for one conversation
_MAX_FACTOR = 10_000
_deadline: ContextVar[float] = ContextVar("deadline", default=float("inf"))


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that checks the time at each operation of a template, and bounds products.

    The longest loop without a check is that of one `range`, which the sandbox bounds.
    """

    intercepted_binops = frozenset({"*", "**"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        _check_deadline()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check_deadline()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _check_deadline()
        return super().call(*args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if isinstance(side, str | list | tuple) else abs(side) for side in (left, right)]
        if max(sizes) > _MAX_FACTOR:
            raise SecurityError(f"operands of {operator} may be at most {_MAX_FACTOR}")
        return super().call_binop(context, operator, left, right)


def _check_deadline() -> None:
    if time.monotonic() > _deadline.get():
        raise SecurityError(f"it takes more than {MAX_SECONDS:g} s")


class ChatTemplate:
    """A compiled template, with the names that Hugging Face gives to it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`. Raises `ConfigError` if it is not a template."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self.source = source
        self.knows_tools = any(name.name == "tools" for name in tree.find_all(Name))
        self._texts = frozenset(const.value for const in tree.find_all(Const) if isinstance(const.value, str))
        self._special_tokens = dict(special_tokens)

    def names(self, text: str) -> bool:
        """Return whether the template compares a value with this text, or writes the text."""
        return text in self._texts

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt of `messages`, for a model that may call `tools`.

        Raises `InvalidRequestError` if the template refuses them.
        """
        names = {**self._special_tokens, "tools": None, "documents": None, **(variables or {})}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        if tools is not None:
            names["tools"] = tools
        _deadline.set(time.monotonic() + MAX_SECONDS)
        try:
            return self._template.render(names)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequestError(message, param="messages") from error


def _refuse(message: str) -> Never:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, with the parameters of the filter in transformers."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
