"""Answers of `/v1/responses`, and the events of their streams."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from loong.server.answers.base import Answer

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Never = Annotated[bool, Meta(extra_json_schema={"const": False})]


class OutputText(Answer, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class OutputMessage(Answer, tag_field="type", tag="message", kw_only=True):
    """A text of the assistant."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(Answer, tag_field="type", tag="function_call"):
    """A call of a function. Its result is sent back with its `call_id`."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: Annotated[
        str, Meta(description="JSON as the model wrote it. In a forced call it follows the schema.")
    ]


OutputItem: TypeAlias = OutputMessage | OutputCall


class InputDetails(Answer):
    """Details of input tokens."""

    cached_tokens: Annotated[int, Meta(description="Input tokens that were read from the prefix cache.")]
    cache_write_tokens: Literal[0] = 0


class OutputDetails(Answer):
    """Details of output tokens."""

    reasoning_tokens: Literal[0] = 0


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Answer, tag_field="reason", tag="max_output_tokens"):
    """The reason of an incomplete answer."""


class ResponseFailure(Answer, tag_field="code", tag="server_error"):
    """The error of a failed answer."""

    message: str


class Response(Answer, tag_field="object", tag="response"):
    """An answer, with the fields of its request."""

    id: str
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: Annotated[ResponseUsage | None, Meta(description="In a stream, with the last event.")]
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, str]
    parallel_tool_calls: bool
    text: dict[str, Any]
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    user: str | None
    previous_response_id: None = None
    store: Annotated[Never, Meta(description="Nothing is stored.")] = False
    background: Never = False
    truncation: Literal["disabled"] = "disabled"


class ResponseEvent(Answer, tag_field="type"):
    """An event of a stream, named by its type. Its subclasses are all that there are."""

    sequence_number: Annotated[int, Meta(description="Counts the events from 0.")] = 0


class Created(ResponseEvent, tag="response.created", kw_only=True):
    """The first event."""

    response: Response


class InProgress(ResponseEvent, tag="response.in_progress", kw_only=True):
    """The second event."""

    response: Response


class ItemAdded(ResponseEvent, tag="response.output_item.added", kw_only=True):
    """A message or a call begins."""

    output_index: int
    item: OutputItem


class PartAdded(ResponseEvent, tag="response.content_part.added", kw_only=True):
    """The text of a message begins."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText


class TextDelta(ResponseEvent, tag="response.output_text.delta", kw_only=True):
    """A piece of a text."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: tuple[()] = ()


class TextDone(ResponseEvent, tag="response.output_text.done", kw_only=True):
    """A whole text."""

    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: tuple[()] = ()


class PartDone(ResponseEvent, tag="response.content_part.done", kw_only=True):
    """The whole text of a message."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText


class ArgumentsDelta(ResponseEvent, tag="response.function_call_arguments.delta", kw_only=True):
    """A piece of the arguments of a call."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(ResponseEvent, tag="response.function_call_arguments.done", kw_only=True):
    """The whole arguments of a call."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class ItemDone(ResponseEvent, tag="response.output_item.done", kw_only=True):
    """A whole message or call."""

    output_index: int
    item: OutputItem


class Completed(ResponseEvent, tag="response.completed", kw_only=True):
    """The last event of a whole answer."""

    response: Response


class Incomplete(ResponseEvent, tag="response.incomplete", kw_only=True):
    """The last event of an answer that was cut off."""

    response: Response


class Failed(ResponseEvent, tag="response.failed", kw_only=True):
    """The last event of an answer that failed."""

    response: Response
