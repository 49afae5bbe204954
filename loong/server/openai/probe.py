"""Search for what a chat template leaves out of a conversation.

A *probe* is the conversation with a marker in the place of each text. A piece is left out if its marker is
not in the prompt of the probe, whatever its text is.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from secrets import randbelow

from loong.server.openai.conversation import Arrangement, Conversation
from loong.server.text.turn_content import followed_by
from loong.server.tools.plain_turns import Turn

_PREFIX = str(10**9 + randbelow(9 * 10**9))  # of digits, which templates do not change
_NUM_DIGITS = 8
_MARKER = re.compile(rf"{_PREFIX}[0-9]{{{_NUM_DIGITS}}}")
_IN_A_DUMP = re.compile(rf"""(['"])text\1: ?(['"]){_MARKER.pattern}""")  # of a list of parts
_PARAMETERS = {
    "type": "object",
    "properties": {"value": {"type": "string", "description": "A value."}},
    "required": ["value"],
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a conversation that has a marker of its own.

    `turn` is the index of its turn.
    """

    field: str
    words: str  # for errors
    turn: int | None = None
    is_needed: bool = True


class Probe:
    """The probe of a conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self._pieces: list[Piece] = []
        self._ids: dict[object, str] = {}  # of calls; some templates prescribe their form
        self._fields = conversation.fields
        turns = [self._marked(index, turn) for index, turn in enumerate(conversation.turns)]
        if conversation.is_continued:  # even if there is no text yet
            turns[-1] = self._continued(turns[-1])
        tools = None
        if conversation.tools is not None:
            function = {"name": self._marker(Piece("tools", "them")), "parameters": _PARAMETERS}
            tools = [{"type": "function", "function": {**function, "description": "A function."}}]
        self.conversation = replace(conversation, turns=turns, tools=tools, is_continued=False)
        self.structure = sha256(self.conversation.request(Arrangement())).digest()  # all but the texts

    def left_out_of(self, prompt: str) -> list[Piece]:
        """Return the pieces that are not in the prompt of the probe.

        A list of parts that is written as a list, with braces and quotes, does not count.
        """
        found = set(_MARKER.findall(_IN_A_DUMP.sub("", prompt)))
        return [piece for number, piece in enumerate(self._pieces) if _numbered(number) not in found]

    def _marked(self, index: int, turn: Turn) -> Turn:
        calls, field = turn.get("tool_calls"), self._fields[index]
        piece = Piece(field, f"this turn of the role {turn['role']!r}", index, is_needed=calls is None)
        marked = {**turn, "content": self._marked_content(turn["content"], piece)}
        if isinstance(calls, list):
            piece = Piece(f"{field}.tool_calls", "them", index)
            marked["tool_calls"] = [self._marked_call(call, piece) for call in calls]
        if "tool_call_id" in turn:
            marked["tool_call_id"] = self._id(turn["tool_call_id"])
        return marked | {key: key for key in ("name", "reasoning_content", "thinking") if key in turn}

    def _continued(self, turn: Turn) -> Turn:
        field = "continue_final_message"
        marker = self._marker(Piece(field, "the end of the message", len(self._fields) - 1))
        return {**turn, "content": followed_by(turn["content"], marker)}

    def _marked_content(self, content: object, piece: Piece) -> object:
        if isinstance(content, list):
            return [{**part, "text": self._marked_content(part["text"], piece)} for part in content]
        return self._marker(piece) if str(content).strip() else content

    def _marked_call(self, call: Mapping[str, object], piece: Piece) -> Mapping[str, object]:
        function = {"name": self._marker(piece), "arguments": {self._marker(piece): "value"}}
        return {**call, "id": self._id(call["id"]), "function": function}

    def _marker(self, piece: Piece) -> str:
        self._pieces.append(piece)
        return _numbered(len(self._pieces) - 1)

    def _id(self, call_id: object) -> str:
        return self._ids.setdefault(call_id, f"{len(self._ids):09}")


def _numbered(number: int) -> str:
    return f"{_PREFIX}{number:0{_NUM_DIGITS}}"
