"""Schemas of answers of `/v1/responses`; tests compare answers with them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from loong.server.reference.answer_schemas import Answer

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(Answer):
    """A text of the assistant."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Answer):
    """A call of a function. Its result is sent back with its `call_id`."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str
    """JSON as the model wrote it. In a forced call it follows the schema."""


class InputDetails(Answer):
    """Details of input tokens. No KV is kept between requests."""

    cached_tokens: Literal[0]
    cache_write_tokens: Literal[0]


class OutputDetails(Answer):
    """Details of output tokens."""

    reasoning_tokens: Literal[0]


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(Answer):
    """The reason of an incomplete answer."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(Answer):
    """The error of a failed answer."""

    code: Literal["server_error"]
    message: str


class Response(Answer):
    """An answer, with the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage | None
    """In a stream, with the last event."""
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
    previous_response_id: None
    store: Literal[False]
    """Nothing is stored."""
    background: Literal[False]
    truncation: Literal["disabled"]


class ResponseEvent(BaseModel):
    """An event of a stream, named by its type. The first and the last events have the response."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    """Counts the events from 0."""
    response: Response | None = None
