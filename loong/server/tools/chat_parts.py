"""Answers that may call tools, in the format of chats."""

from collections.abc import Iterable, Iterator

from msgspec import UNSET

from loong.server.answers.chats import (
    AssistantMessage,
    CalledFunction,
    FunctionDelta,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
)
from loong.server.tools.parts import CallArguments, CallStart, Part


def message_of(parts: Iterable[Part]) -> AssistantMessage:
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
    calls = [
        ToolCall(start.call_id, CalledFunction(start.name, "".join(pieces)))
        for start, pieces in zip(starts, arguments, strict=True)
    ]
    return AssistantMessage(
        content="".join(content) if content or not calls else None, tool_calls=calls or UNSET
    )


class ChoiceDeltas:
    """The deltas of one choice of a stream, in order."""

    def __init__(self) -> None:
        self._has_content = False
        self.has_calls = False

    def of(self, parts: Iterable[Part], *, is_needed: bool, is_last: bool) -> Iterator[MessageDelta]:
        """Yield the deltas of some parts, and at least one if `is_needed`."""
        parts = list(parts)
        if is_last and not (parts or self._has_content or self.has_calls):
            parts = [""]
        for part in parts:
            match part:
                case str():
                    self._has_content = True
                    yield MessageDelta(content=part)
                case CallStart():
                    self.has_calls = True
                    yield MessageDelta(tool_calls=[_begun(part)])
                case CallArguments():
                    call = ToolCallDelta(index=part.index, function=FunctionDelta(arguments=part.text))
                    yield MessageDelta(tool_calls=[call])
        if is_last or (is_needed and not parts):
            yield MessageDelta()


def _begun(start: CallStart) -> ToolCallDelta:
    function = FunctionDelta(name=start.name, arguments="")
    return ToolCallDelta(index=start.index, id=start.call_id, type="function", function=function)
