"""Middleware of every request: the check of the key, and errors in the format of the API."""

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from loong.server.api.api_keys import KEY_NUMBER, key_number
from loong.server.api.errors import ApiError, as_api_error
from loong.server.api.json_bodies import json_response
from loong.server.context import SERVER

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/", "/dashboard"})
ADMIN_PATHS = frozenset({"/admin/instances", "/admin/scale"})  # for the admin key alone
OPERATOR_PATHS = frozenset(  # for the admin key alone if there is one
    {"/admin/faults", "/reset_prefix_cache", "/start_profile", "/stop_profile"}
)
OPEN_FOLDER = "/dashboard/page/"  # the page asks for the key, and has no data without it


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer any error with an error object, also unexpected errors and those of the web framework."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        code = error.reason.lower().replace(" ", "_")
        message = _explained(request, error)
        return _refusal(request, ApiError(error.status, message, code, headers=_kept_headers(error)))
    except (ConnectionError, HttpProcessingError):  # the client has left, or did not send HTTP
        raise
    except Exception as error:  # noqa: BLE001  a client gets an answer to any error
        return _refusal(request, as_api_error(error))


@web.middleware
async def check_api_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let a request pass if no key is set, if it carries a key, or if its path is open to all.

    Paths of operators need the admin key in any case.
    """
    keys = request.app[SERVER].settings.api_keys
    has_admin_key = request.app[SERVER].settings.admin_key is not None
    if request.path in ADMIN_PATHS or (request.path in OPERATOR_PATHS and has_admin_key):
        _check_admin_key(request)
    elif keys and request.path not in OPEN_PATHS and not request.path.startswith(OPEN_FOLDER):
        number = key_number(request.headers.get("Authorization", ""), keys)
        if number is None:
            message = "this server needs an API key: send the header `Authorization: Bearer KEY`"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        request[KEY_NUMBER] = number
    return await handler(request)


def _check_admin_key(request: web.Request) -> None:
    admin_key = request.app[SERVER].settings.admin_key
    if admin_key is None:
        message = "the server was started without --admin-key, so it takes no commands of operators"
        raise ApiError(403, message, "admin_is_off")
    if key_number(request.headers.get("Authorization", ""), (admin_key,)) is None:
        message = f"{request.path} needs the admin key: send the header `Authorization: Bearer KEY`"
        raise ApiError(401, message, "invalid_admin_key", headers={"WWW-Authenticate": "Bearer"})


def _explained(request: web.Request, error: web.HTTPException) -> str:
    """Return the message for an error that the web framework raised."""
    match error:
        case web.HTTPNotFound():
            return _what_there_is(request)
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return f"{request.path} takes {allowed}, but the method is {error.method}"
        case _:
            return error.text or error.reason


def _what_there_is(request: web.Request) -> str:
    """Return the message for a path that does not exist, such as `/v1/embeddings`."""
    resources = (resource.canonical for resource in request.app.router.resources())
    paths = [path for path in dict.fromkeys(resources) if not path.startswith(OPEN_FOLDER)]
    return f"there is no {request.path} here; this server has {', '.join(paths)}"


def _kept_headers(error: web.HTTPException) -> dict[str, str]:
    return {name: error.headers[name] for name in ("Allow",) if name in error.headers}


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    if (server := request.app.get(SERVER)) is not None:
        server.metrics.observe_refusal(error.code)
    response = json_response(error.body, error.status)
    response.headers.update(error.headers)
    if error.status == 503 and server is not None:
        response.headers.setdefault("Retry-After", str(server.settings.retry_after))
    if error.code == "shutting_down":
        response.force_close()
    return response
