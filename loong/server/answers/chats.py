"""Answers of `/v1/chat/completions`."""

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from loong.server.answers.base import Answer, FinishReason, StopReason
from loong.server.answers.completions import PromptLogprobs, Usage

ChatFinishReason = FinishReason | Literal["tool_calls"]


class TokenLogprob(Answer):
    """A token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """The log probabilities of the chosen token and of the likeliest ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    """An entry for each token."""

    content: list[ChosenLogprob]


class CalledFunction(Answer):
    """The name and the arguments of a call."""

    name: str
    arguments: Annotated[
        str, Meta(description="JSON as the model wrote it. In a forced call it follows the schema.")
    ]


class ToolCall(Answer, tag_field="type", tag="function"):
    """A call of a tool."""

    id: str
    function: CalledFunction


class AssistantMessage(Answer, kw_only=True):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | None, Meta(description="Null if there are calls and no text.")]
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Answer, tag_field="object", tag="chat.completion"):
    """A turn of the assistant."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


class FunctionDelta(Answer, kw_only=True):
    """The name of a function, or a piece of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Answer, kw_only=True):
    """The news of a call: its id and name first, then its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class MessageDelta(Answer):
    """The news of the assistant's turn."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Answer):
    """A piece of one choice. The first piece has the role."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Answer, tag_field="object", tag="chat.completion.chunk"):
    """An event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
