"""ShareGPT: conversations of people with ChatGPT, as text."""

import json
from pathlib import Path

import msgspec

from loong.workloads.datasets.recording import RecordedTrace, Row, bad
from loong.workloads.datasets.text import estimated_tokens
from loong.workloads.request import RequestShape, TokenRun

LEAST_TOKENS = 4


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn]


def read_sharegpt(path: Path) -> RecordedTrace:
    """Read a file such as ShareGPT_V3_unfiltered_cleaned_split.json: a list of objects with `conversations`.

    The first turn is the prompt and the second the answer. Conversations of fewer turns, or with fewer than 4
    tokens in either, are left out, as vLLM's benchmark does. Lengths are `estimated_tokens`.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as error:
        raise bad(path, "its nesting", "too deep") from error
    except json.JSONDecodeError as error:
        raise bad(path, f"line {error.lineno}", error.msg) from error
    except UnicodeDecodeError as error:
        raise bad(path, f"byte {error.start}", error.reason) from error
    rows = []
    for number, entry in enumerate(entries, 1):
        try:
            turns = msgspec.convert(entry, _Conversation).conversations
        except msgspec.ValidationError as error:
            raise bad(path, f"entry {number}", str(error)) from error
        sizes = [estimated_tokens(turn.value) for turn in turns[:2]]
        if len(sizes) == 2 and min(sizes) >= LEAST_TOKENS:
            rows.append(Row(None, RequestShape((TokenRun(number, sizes[0]),), sizes[1])))
    return RecordedTrace("ShareGPT", tuple(rows))
