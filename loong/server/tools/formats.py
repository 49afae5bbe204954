"""The formats of tool calls, and the choice of a format for a chat template."""

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loong.core.errors import ConfigError

if TYPE_CHECKING:
    from loong.server.text.chat_template import ChatTemplate  # slow to import

_ID_LETTERS = string.ascii_letters + string.digits


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_call_id() -> str:
    """Return an id of nine letters and digits, because Mistral's templates allow no others."""
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of calls in an answer.

    Each call is an object with a `name`, and its arguments as `arguments_key`. A call stands after `begin`,
    and `end` follows it. With `begins_bare` an object at the start of an answer needs no `begin`. Calls after
    one `begin` stand between `separator`s, or each has its own `begin` if that is None. `is_list` puts them
    in brackets. The prompt of a forced call ends with `in_prompt`.
    """

    name: str
    begin: str
    end: str
    separator: str | None
    arguments_key: str
    begins_bare: bool = False
    is_list: bool = False
    in_prompt: str = ""
    make_id: Callable[[], str] = _call_id  # id of a call

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that may be special tokens of a model, which must not be skipped."""
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
    """Return the format of a name, or the format of a template; None if it is unknown.

    A template without tools uses Hermes' format, which the system turn then explains. Raises `ConfigError`
    for another name with such a template.
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
