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
    """Return an id that nothing else has."""
    return uuid4().hex


@web.middleware
async def note_request_id(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keep a request's id for its answer and for the log."""
    _REQUEST_ID.set(_clients_id(request) or new_id())
    return await handler(request)


def note_answer_id(request: web.Request, answer_id: str) -> None:
    """Let a request that came without an id have that of its answer."""
    if _clients_id(request) is None:
        _REQUEST_ID.set(answer_id)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Write the id into the head of an answer, before that is sent."""
    noted = _REQUEST_ID.get("")  # by no middleware if what a request expects was refused
    response.headers[HEADER] = noted or _clients_id(request) or new_id()


def logged_name(request_id: RequestId | None = None) -> str:
    """Return the name of a request in the log: its id in the engine, and its client's if it has one."""
    noted = _REQUEST_ID.get("without an id")
    if request_id is None or request_id.startswith(noted):
        return request_id or noted
    return f"{request_id} ({HEADER} {noted})"


def _clients_id(request: web.Request) -> str | None:
    given = request.headers.get(HEADER, "")
    return given if 0 < len(given) <= _MAX_LENGTH and given.isascii() and given.isprintable() else None
