"""Command lines as documents and messages show them."""

import shlex
from collections.abc import Sequence

_KEY_FLAGS = ("--api-key", "--admin-key")
_HIDDEN = "***"


def shown_command(words: Sequence[str]) -> str:
    """Return a command line without the keys in it, also without those in a line that is one of its words."""
    shown: list[str] = []
    is_key = False
    for word in words:
        name, equals, value = word.partition("=")
        if is_key:
            shown.append(_HIDDEN)
        elif name.replace("_", "-") in _KEY_FLAGS and equals:
            shown.append(f"{name}={_HIDDEN}")
        elif equals:
            shown.append(f"{name}={_shown_line(value)}")
        else:
            shown.append(_shown_line(word) if " " in word else word)
        is_key = word.replace("_", "-") in _KEY_FLAGS
    return shlex.join(shown)


def _shown_line(text: str) -> str:
    if not any(flag in text.replace("_", "-") for flag in _KEY_FLAGS):
        return text
    try:
        return shown_command(shlex.split(text))
    except ValueError:  # a quotation mark without its partner
        return _HIDDEN
