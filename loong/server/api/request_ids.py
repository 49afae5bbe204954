"""The header `X-Request-Id` of every answer: the client's own id, a completion's, or a new one."""

from contextvars import ContextVar
from uuid import uuid4

from aiohttp import web
from aiohttp.typedefs import Handler

from loong.core.request import RequestId

HEADER = "X-Request-Id"
_MAX_LENGTH = 128  # characters
_REQUEST_ID: ContextVar[str] = ContextVar("request_id")


def new_id() -> str:
    """Return a unique id."""
    return uuid4().hex


@web.middleware
async def note_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Record a request's id for its answer and for the log."""
    _REQUEST_ID.set(_clients_id(request) or new_id())
    return await handler(request)


def note_answer_id(request: web.Request, answer_id: str) -> None:
    """Set the id of a request that came without one to the id of its answer."""
    if _clients_id(request) is None:
        _REQUEST_ID.set(answer_id)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Write the id into the headers of an answer, before they are sent."""
    noted = _REQUEST_ID.get("")  # empty if the Expect header was refused before the middleware
    response.headers[HEADER] = noted or _clients_id(request) or new_id()


def logged_name(request_id: RequestId | None = None) -> str:
    """Return the name of a request in the log: its id in the engine, and the client's id if it has one."""
    noted = _REQUEST_ID.get("without an id")
    if request_id is None or request_id.startswith(noted):
        return request_id or noted
    return f"{request_id} ({HEADER} {noted})"


def _clients_id(request: web.Request) -> str | None:
    given = request.headers.get(HEADER, "")
    return given if 0 < len(given) <= _MAX_LENGTH and given.isascii() and given.isprintable() else None
