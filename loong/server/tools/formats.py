"""The ways in which models write calls of tools, and which of them a chat template goes with."""

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError

if TYPE_CHECKING:
    from loong.server.text.chat_template import ChatTemplate  # which takes a while to import

_ID_LETTERS = string.ascii_letters + string.digits


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_call_id() -> str:
    """Return an id of nine letters and digits, the only ones that Mistral's templates take."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written in an answer.

    Each call is an object with a `name`, and its arguments as `arguments_key`. A call stands after `begin`,
    and `end` follows it. With `begins_bare` an object at the beginning of an answer needs no `begin`. Calls
    after one `begin` stand between `separator`s, None if each has its own `begin`, and in brackets if
    `is_list`. The prompt of a forced call ends with `in_prompt`.
    """

    name: str
    begin: str
    end: str
    separator: str | None
    arguments_key: str
    begins_bare: bool = False
    is_list: bool = False
    in_prompt: str = ""
    make_id: Callable[[], str] = _call_id  # of a call

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that a model may have special tokens for, which must be read all the same."""
        return tuple(filter(None, (self.begin, self.end)))


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>", None, "arguments")
LLAMA3 = CallFormat("llama3_json", "<|python_tag|>", "", ";", "parameters", begins_bare=True)
MISTRAL = CallFormat(
    "mistral",
    "[TOOL_CALLS]",
    "",
    ",",
    "arguments",
    is_list=True,
    in_prompt="[TOOL_CALLS]",
    make_id=_short_call_id,
)
FORMATS: Mapping[str, CallFormat] = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}
_OTHER_CONTENTS = "<function="  # between Hermes' tags, in the templates of some newer models


def choose_format(template: "ChatTemplate | None", name: str | None) -> CallFormat | None:
    """Return the format that a template goes with, or the one of a name; None if none is known to.

    A template that knows no tools goes with Hermes' format, in which the system turn then tells of them.
    Raises `ConfigError` for another name beside such a template.
    """
    if template is None or not template.knows_tools:
        if name not in (None, HERMES.name):
            raise ConfigError(
                f"--tool-call-parser {name} does not go with a chat template that knows no tools; "
                f"{HERMES.name} does"
            )
        return HERMES
    if name is not None:
        return FORMATS[name]
    source = template.source
    if MISTRAL.begin in source:
        return MISTRAL
    if HERMES.begin in source:
        return None if _OTHER_CONTENTS in source else HERMES
    is_llama = LLAMA3.begin in source or ("<|start_header_id|>" in source and '"parameters": ' in source)
    return LLAMA3 if is_llama else None
