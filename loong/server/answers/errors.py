"""The answer of each request that fails."""

from typing import Annotated, Literal

from msgspec import Meta

from loong.server.answers.base import Answer


class ErrorFields(Answer):
    """The error."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: Annotated[str | None, Meta(description="The field at fault.")]
    code: Annotated[str, Meta(description="The kind of the error, as in `loong:request_refused_total`.")]


class Error(Answer):
    """Every answer without success, or an event in a stream that has begun."""

    error: ErrorFields
