"""Turns of conversations, as clients send them."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic_core import PydanticKnownError, from_json

from loong.server.api.schema_base import Schema
from loong.server.text.turn_content import text_of

MAX_MESSAGES = 4096
MAX_TOOL_CALLS = 128  # in one turn
MAX_ID_LENGTH = 256  # characters
KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

Role = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(Schema):
    """A piece of a message. Keys that are not listed here are ignored, with a warning in the log."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: str


def _only(empty: object) -> AfterValidator:
    """Refuse any other value like an unknown field, because ignoring it would lose a part of the turn."""

    def check(value: object) -> object:
        if value != empty:
            raise PydanticKnownError("extra_forbidden")
        return value

    return AfterValidator(check)


def _object_of(arguments: str) -> dict[str, object]:
    """Return the arguments of a call, {} for an empty text. Raises ValueError if they are not an object."""
    value: object = from_json(arguments, allow_inf_nan=False) if arguments.strip() else {}
    if isinstance(value, dict):
        return value
    raise ValueError("the arguments of a call are a JSON object")


def check_arguments(arguments: str) -> str:
    """Return the arguments of a call. Raises ValueError if they are not a JSON object."""
    _object_of(arguments)
    return arguments


class EarlierFunction(Schema):
    """The name and the arguments of a call."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]
    arguments: Annotated[str, AfterValidator(check_arguments)] = ""
    """A JSON object as text, which chat templates see as an object."""


class EarlierCall(Schema):
    """A tool call of an earlier answer."""

    model_config = ConfigDict(extra="allow")

    id: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)]
    type: Literal["function"] = "function"
    function: EarlierFunction

    def for_template(self) -> dict[str, object]:
        """Return the call as chat templates expect it."""
        function = {"name": self.function.name, "arguments": _object_of(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


_NEEDED: JsonDict = {
    "required": ["role"],
    "allOf": [
        {
            "if": {"properties": {"role": {"const": "assistant"}}, "required": ["role"]},
            "else": {"required": ["content"]},
        },
        {
            "if": {"properties": {"role": {"const": "tool"}}, "required": ["role"]},
            "then": {"required": ["tool_call_id"]},
        },
    ],
}


class Message(Schema):
    """One turn of a conversation, as servers return it and clients keep it.

    Unknown keys are ignored, with a warning in the log. Chat templates see the role, the content, the name,
    and the fields of tool calls.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra=_NEEDED)

    role: Role
    """`system`, `developer`, `user`, `assistant`, `tool`, or another that the model's chat template takes."""
    content: Annotated[list[TextPart], BeforeValidator(_as_parts, str | list[TextPart])]
    """A text, or its pieces, which are joined by line breaks unless the chat template takes pieces. Special
    tokens in it are plain text. A turn of the assistant may have none."""
    name: str | None = None
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_TOOL_CALLS)] = []
    """The calls of a turn of the assistant."""
    tool_call_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)] | None = None
    """Of a turn of the role `tool`: the earlier call that it is the result of."""
    function_call: Annotated[Any, _only(None), WithJsonSchema({"const": None})] = None
    """Not supported: null."""
    audio: Annotated[Any, _only(None), WithJsonSchema({"const": None})] = None
    """Not supported: null."""
    refusal: Annotated[Any, _only(""), WithJsonSchema({"const": ""})] = ""
    """Not supported: empty, or null."""
    reasoning_content: Any = None
    """The reasoning of an earlier turn, which many chat templates leave out. Ignored if it is no text."""
    reasoning: Any = None
    """Another name of `reasoning_content`."""
    annotations: Any = None
    """Ignored."""
    _is_text: bool = False  # the content was given as one text

    @model_validator(mode="wrap")
    @classmethod
    def _keep_form(cls, message: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Note the form of the content. Take an assistant's turn without content as an empty text."""
        if not isinstance(message, dict):
            return handler(message)
        if message.get("role") == "assistant" and message.get("content") is None:
            message = {**message, "content": ""}
        read = handler(message)
        read._is_text = isinstance(message["content"], str)
        return read

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls go with the role assistant, but the role is {self.role}")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise ValueError("tool_call_id goes with the role tool, and with no other")
        return self

    def ignored_keys(self) -> Iterator[str]:
        """Yield the unknown keys of the message and of its parts."""
        calls = ((call, call.function) for call in self.tool_calls)
        for part in (self, *self.content, *chain.from_iterable(calls)):
            yield from part.model_extra or ()

    def for_template(self) -> dict[str, object]:
        """Return the message as chat templates expect it, its content in the form in which it was given."""
        parts = [{"type": part.type, "text": part.text} for part in self.content]
        turn: dict[str, object] = {"role": self.role, "content": text_of(parts) if self._is_text else parts}
        if self.name is not None:
            turn["name"] = self.name
        for reasoning in (self.reasoning_content, self.reasoning):
            if isinstance(reasoning, str) and reasoning:
                turn |= {"reasoning_content": reasoning, "thinking": reasoning}  # both names are in use
                break
        if self.tool_calls:  # templates test for the key
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


def _are_answered(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages. Raises ValueError if one is the result of a call that no earlier message has."""
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        if message.tool_call_id is not None and message.tool_call_id not in call_ids:
            raise ValueError(
                f"{index}.tool_call_id is {message.tool_call_id!r}, but no earlier message has such a call"
            )
        call_ids.update(call.id for call in message.tool_calls)
    return messages


Messages = Annotated[
    list[Message], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(_are_answered)
]
