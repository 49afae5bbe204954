"""Conversations with all that chats may have."""

from collections.abc import Mapping, Sequence
from typing import Any

Turn = dict[str, Any]  # JSON
TOOLS: Sequence[Turn] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds a thing.",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": {"type": "string"},
                    "n": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["what"],
            },
        },
    }
]


def _says(role: str, *texts: str, **others: object) -> Turn:
    content = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    return {"role": role, "content": content, **others}


def _part(role: str, text: str) -> Turn:
    return {"role": role, "content": [{"type": "text", "text": text}]}


def _calls(*whats: str, content: str | None = None) -> Turn:
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": "find", "arguments": f'{{"what": "{what}", "n": [1, 2.0]}}'},
        }
        for number, what in enumerate(whats)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(number: int, text: str) -> Turn:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": "find", "content": text}


_ASK, _RULE, _ANSWER = (
    _says("user", "  Ask été? \n"),
    _says("system", "Rule {{ 1 }}."),
    _says("assistant", "Well."),
)
_LOOP = [_ASK, _calls("père"), _result(0, "Found: mère")]

CONVERSATIONS: Mapping[str, Sequence[Turn]] = {
    "one turn": [_ASK],
    "a system turn": [_RULE, _ASK],
    "many turns": [
        _RULE,
        _ASK,
        _ANSWER,
        _says("user", "More!"),
        _says("assistant", "No."),
        _says("user", "Why"),
    ],
    "a developer": [_says("developer", "Law."), _ASK],
    "a system turn and a developer": [_RULE, _says("developer", "Law."), _ASK],
    "two system turns": [_RULE, _says("system", "Law."), _ASK],
    "a late system turn": [_ASK, _ANSWER, _says("system", "Law."), _says("user", "More!")],
    "a late developer": [_RULE, _ASK, _ANSWER, _says("developer", "Law."), _says("user", "More!")],
    "a system turn alone": [_RULE],
    "a part": [_part("user", "Ask?")],
    "two parts": [_says("user", "Ask?", "Say!")],
    "parts everywhere": [
        _part("system", "Rule."),
        _says("user", "Ask?", "Say!"),
        _part("assistant", "Well."),
        _part("user", "More!"),
    ],
    "parts after a text": [_RULE, _part("user", "Ask?")],
    "a name": [_says("user", "Ask?", name="ada")],
    "reasoning": [_ASK, _says("assistant", "Well.", reasoning_content="Hm."), _says("user", "More!")],
    "an end that thinks": [
        _ASK,
        _says("assistant", "<think>\nHm.\n</think>\n\nWell."),
        _says("user", "More!"),
    ],
    "an unknown role": [_says("user", "Ask?"), _says("critic", "Boo.")],
    "a call": _LOOP,
    "a call after a system turn": [_RULE, *_LOOP],
    "a call that is over": [_RULE, *_LOOP, _ANSWER, _says("user", "More!")],
    "a call with a text": [_ASK, _calls("père", content="Let me see."), _result(0, "found")],
    "two calls": [
        _ASK,
        _calls("père", "mère"),
        _result(0, "one"),
        _result(1, "two"),
        _ANSWER,
        _says("user", "So"),
    ],
    "a call after reasoning": [
        _ASK,
        {**_calls("père"), "reasoning_content": "I must look."},
        _result(0, "found"),
    ],
}
