"""Errors as the OpenAI API words them: `{"error": {"message", "type", "param", "code"}}`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from loong.core.errors import EngineStoppedError, InvalidRequestError, LoongError
from loong.server.api.request_ids import logged_name

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ApiError(LoongError):
    """An answer other than success: an HTTP status and the fields of the error object."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, object]:
        """The JSON object that tells a client what went wrong."""
        error_type = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """What the client sent cannot be served, because of the field `param`."""
    return ApiError(400, message, code, param)


def as_api_error(error: Exception) -> ApiError:
    """Say any error in the API's words: bad input is the client's fault, all else the server's.

    One that nobody raised on purpose is logged; the client is not told what it says.
    """
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return bad_request(str(error), error.param)
        case EngineStoppedError():
            return ApiError(503, str(error), "engine_stopped")
        case LoongError():
            return ApiError(500, str(error) or type(error).__name__, "internal_error")
        case _:
            logger.error("request %s failed in a way that nobody foresaw", logged_name(), exc_info=error)
            return ApiError(500, "the server failed at this request; its log says how", "internal_error")
