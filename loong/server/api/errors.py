"""Errors in the format of the OpenAI API: `{"error": {"message", "type", "param", "code"}}`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from loong.core.errors import (
    EngineStoppedError,
    InvalidRequestError,
    LoongError,
    RequestFailedError,
    RequestTooLargeError,
)
from loong.server.answers.errors import Error, ErrorFields
from loong.server.api.request_ids import logged_name

logger = logging.getLogger(__name__)

_NO_RETRY = {"X-Should-Retry": "false"}  # OpenAI's clients send other requests again that got 500


@dataclass(eq=False)
class ApiError(LoongError):
    """An error response: an HTTP status and the fields of the error object."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> Error:
        """The answer that describes the error."""
        kind: Literal["invalid_request_error", "server_error"] = (
            "invalid_request_error" if self.status < 500 else "server_error"
        )
        return Error(ErrorFields(self.message, kind, self.param, self.code))


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """Return the error for a request that cannot be served because of its field `param`."""
    return ApiError(400, message, code, param)


def as_api_error(error: Exception) -> ApiError:
    """Return any error as an API error: bad input is the client's fault, everything else the server's.

    An unexpected error is logged, and its text is not sent to the client.
    """
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return bad_request(str(error), error.param)
        case RequestTooLargeError():
            return ApiError(409, str(error), "request_too_large")
        case EngineStoppedError():
            return ApiError(503, str(error), "engine_stopped")
        case RequestFailedError():
            return ApiError(500, str(error), error.code, headers=_NO_RETRY)
        case LoongError():
            return ApiError(500, str(error) or type(error).__name__, "internal_error")
        case _:
            logger.error("request %s failed with an unexpected error", logged_name(), exc_info=error)
            return ApiError(500, "the server failed at this request; its log has the error", "internal_error")
