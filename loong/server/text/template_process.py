"""The process that renders chat templates, so that a hostile one can only end this process.

A request is JSON: the `source` of a template and its `names`, or null in their place to compile it alone. The
answer is an `Outcome` as a byte, and the text or the error.
"""

import json
from collections.abc import Mapping
from enum import IntEnum

from loong.processes.bounded_process import answer_requests
from loong.processes.child import name_process
from loong.server.text.template_sandbox import compiled, rendered

MAX_CHARACTERS = 2**26  # of a text; as many bytes as a body may have
_MAX_ERROR = 1000  # characters


class Outcome(IntEnum):
    """The kind of an answer: the text, an error of the template's own, or a bound that it exceeds."""

    TEXT = 0
    REFUSED = 1
    EXCEEDED = 2


def main() -> None:
    """Answer requests until standard input ends."""
    name_process("loong-templates")
    answer_requests(lambda: answer)


def answer(request: bytes) -> bytes:
    """Return the answer to a request."""
    try:
        asked = json.loads(request)
        if asked["names"] is None:
            compiled(asked["source"])
            return _encoded(Outcome.TEXT, "")
        return _rendered(asked["source"], asked["names"])
    except MemoryError:
        return _encoded(Outcome.EXCEEDED, "it takes too much memory")
    except Exception as error:  # noqa: BLE001  a template, and what it calls, may raise anything
        return _encoded(Outcome.REFUSED, _words_of(error))


def _rendered(source: str, names: Mapping[str, object]) -> bytes:
    pieces, num_characters = [], 0
    for piece in rendered(source, names):
        pieces.append(piece)
        num_characters += len(piece)
        if num_characters > MAX_CHARACTERS:
            return _encoded(Outcome.EXCEEDED, f"it writes more than {MAX_CHARACTERS} characters")
    return _encoded(Outcome.TEXT, "".join(pieces))


def _words_of(error: Exception) -> str:
    words = str(error) or type(error).__name__
    return words if len(words) <= _MAX_ERROR else f"{words[:_MAX_ERROR]} ..."


def _encoded(outcome: Outcome, text: str) -> bytes:
    errors = "strict" if outcome is Outcome.TEXT else "backslashreplace"
    return bytes([outcome]) + text.encode(errors=errors)
