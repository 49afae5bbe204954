"""Answers that may call tools, in the format of chats."""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from loong.server.tools.parts import CallArguments, CallStart, Part

Json: TypeAlias = dict[str, object]

TOOL_CALLS = "tool_calls"  # the finish reason, and the field of the calls


def message_of(parts: Iterable[Part]) -> Json:
    """Return the assistant's turn. Its content is null if it has calls and no text."""
    content: list[str] = []
    starts: list[CallStart] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part:
            case str():
                content.append(part)
            case CallStart():
                starts.append(part)
                arguments.append([])
            case CallArguments():
                arguments[part.index].append(part.text)
    message: Json = {"role": "assistant", "content": "".join(content) if content or not starts else None}
    if starts:
        message[TOOL_CALLS] = [
            _call(start, "".join(pieces)) for start, pieces in zip(starts, arguments, strict=True)
        ]
    return message


def _call(start: CallStart, arguments: str) -> Json:
    return {
        "id": start.call_id,
        "type": "function",
        "function": {"name": start.name, "arguments": arguments},
    }


class ChoiceDeltas:
    """The deltas of one choice of a stream, in order."""

    def __init__(self) -> None:
        self._has_begun = False
        self._has_content = False
        self.has_calls = False

    def of(self, parts: Iterable[Part], *, is_needed: bool, is_last: bool) -> Iterator[Json]:
        """Yield the deltas of some parts, the role before the first, and at least one if `is_needed`."""
        parts = list(parts)
        if is_last and not (parts or self._has_content or self.has_calls):
            parts = [""]
        if not self._has_begun and (parts or is_needed):
            self._has_begun = True
            yield {"role": "assistant", "content": "" if parts and isinstance(parts[0], str) else None}
        for part in parts:
            match part:
                case str():
                    self._has_content = True
                    yield {"content": part}
                case CallStart():
                    self.has_calls = True
                    yield {TOOL_CALLS: [{"index": part.index, **_call(part, "")}]}
                case CallArguments():
                    yield {TOOL_CALLS: [{"index": part.index, "function": {"arguments": part.text}}]}
        if is_last or (is_needed and not parts):
            yield {}
