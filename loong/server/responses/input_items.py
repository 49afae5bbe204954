"""The input of a response: turns, function calls and their results."""

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from loong.server.api.schema_base import Schema
from loong.server.openai.messages import MAX_ID_LENGTH, MAX_MESSAGES, check_arguments
from loong.server.tools.fields import ToolName

Turn: TypeAlias = dict[str, object]  # a message, as chats have it

CallId = Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]


class TextPiece(Schema):
    """A text. Unknown keys have no effect."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text"]
    text: str


def _as_pieces(value: object) -> object:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Content = Annotated[list[TextPiece], BeforeValidator(_as_pieces, str | list[TextPiece])]


def _text_of(content: list[TextPiece]) -> str:
    return "\n".join(piece.text for piece in content)


class _Item(Schema):
    """An item like those of answers, whose other keys (`id`, `status`) have no effect."""

    model_config = ConfigDict(extra="ignore")


class InputMessage(_Item):
    """A turn of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def turn(self) -> Turn:
        """Return the turn as chats have it."""
        return {"role": self.role, "content": _text_of(self.content)}


class InputCall(_Item):
    """A call from an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    name: ToolName
    arguments: Annotated[str, AfterValidator(check_arguments)]
    """A JSON object as text."""

    def turn(self) -> Turn:
        """Return the turn as chats have it."""
        function = {"name": self.name, "arguments": self.arguments}
        call = {"id": self.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


class InputResult(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Content

    def turn(self) -> Turn:
        """Return the turn as chats have it."""
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text_of(self.output)}


class InputReasoning(_Item):
    """The reasoning of another model in an earlier turn, which is not part of the prompt."""

    type: Literal["reasoning"]

    def turn(self) -> None:
        """Return no turn."""
        return


def _kind_of(item: object) -> object:
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(
        _kind_of,
        custom_error_type="item_type",
        custom_error_message="Input should be a message, function_call, function_call_output or reasoning",
    ),
]


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _are_answered(items: list[InputItem]) -> list[InputItem]:
    """Return the items.

    Raises ValueError if one is the result of a call that is not among the earlier items.
    """
    call_ids: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, InputCall):
            call_ids.add(item.call_id)
        elif isinstance(item, InputResult) and item.call_id not in call_ids:
            raise ValueError(f"{index}.call_id is {item.call_id!r}, but no earlier item is such a call")
    return items


Items = Annotated[
    list[InputItem],
    Field(min_length=1, max_length=MAX_MESSAGES),
    BeforeValidator(_as_items, str | list[InputItem]),
    AfterValidator(_are_answered),
]


def turns_of(items: list[InputItem]) -> tuple[list[Turn], list[int]]:
    """Return the turns of a chat, and the index of the item where each begins.

    A call belongs to the assistant's turn before it.
    """
    turns: list[Turn] = []
    indices: list[int] = []
    for index, item in enumerate(items):
        turn = item.turn()
        if turn is None:
            continue
        calls = turn.get("tool_calls")
        last = turns[-1] if turns else None
        if isinstance(calls, list) and last is not None and last["role"] == "assistant":
            earlier = last.get("tool_calls", [])
            assert isinstance(earlier, list)
            turns[-1] = {**last, "tool_calls": [*earlier, *calls]}
        else:
            turns.append(turn)
            indices.append(index)
    return turns, indices
