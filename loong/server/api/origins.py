"""Checks of browser pages: the server's own and those of allowed origins may use it, no others.

A browser names the page that sends a request in `Origin`. Without it, `Sec-Fetch-Site` says whether the page
is a foreign one. Neither detects DNS rebinding, where the host name of a foreign page resolves to this
machine. The Host header of such a request has that name.
"""

from ipaddress import ip_address
from socket import gethostname

from aiohttp import web
from aiohttp.typedefs import Handler

from loong.server.api.errors import ApiError
from loong.server.api.parsing import short
from loong.server.context import SERVER
from loong.server.settings import ANY_ORIGIN, AUTHORITY, ServerSettings

IS_LOOPBACK = web.AppKey("is_loopback", bool)  # True if the server listens on a loopback address
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST",
    "Access-Control-Allow-Headers": "*, Authorization",  # the wildcard does not include it
    "Access-Control-Max-Age": "600",
}
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})  # another port of this host is of the same site


@web.middleware
async def check_origin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests from pages of foreign origins, and answer the preflight requests of allowed ones.

    Raises a 403 that names the Host or the origin, and the flag that allows it.
    """
    settings = request.app[SERVER].settings
    if not settings.api_keys:
        _check_host(request, settings)
    page = _foreign_page(request)
    if page is not None and not settings.allows_origin(page):
        message = f"pages of {short(page)!r} may not use this server; --allowed-origins names those that may"
        raise ApiError(403, message, "origin_not_allowed")
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return web.Response(status=204, headers=_PREFLIGHT)
    return await handler(request)


async def allow_reading(request: web.Request, response: web.StreamResponse) -> None:
    """Let pages of an allowed origin read the answer, for any status; a signal of aiohttp."""
    settings = request.app[SERVER].settings
    if not settings.allowed_origins:
        return
    origin = request.headers.get("Origin")
    if ANY_ORIGIN in settings.allowed_origins:
        response.headers["Access-Control-Allow-Origin"] = ANY_ORIGIN
    else:
        response.headers.add("Vary", "Origin")
        if origin is not None and settings.allows_origin(origin):
            response.headers["Access-Control-Allow-Origin"] = origin
    response.headers["Access-Control-Expose-Headers"] = "*"


def is_loopback(name: str) -> bool:
    """Return whether a host name or address is of the loopback interface, without a look-up."""
    if name == "localhost":
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _check_host(request: web.Request, settings: ServerSettings) -> None:
    host = request.headers.get("Host")
    if host is None or ANY_ORIGIN in settings.allowed_origins:  # browsers always send one
        return
    found = AUTHORITY.fullmatch(host.lower())
    name = "" if found is None else found["name"].strip("[]")
    if is_loopback(name) or name in settings.host_names:
        return
    if request.app[IS_LOOPBACK] or _may_be_foreign(name):
        message = (
            f"the Host {short(host)!r} is no known name of this server, which has no API key; "
            "--allowed-origins http://HOST allows it, and so does an API key"
        )
        raise ApiError(403, message, "host_not_allowed")


def _may_be_foreign(name: str) -> bool:
    """Return whether a page of another site can have this name, unlike an address or a local host's name."""
    try:
        ip_address(name)
    except ValueError:
        return not name or ("." in name and name != gethostname().lower())
    return False


def _foreign_page(request: web.Request) -> str | None:
    """Return the origin of the page that sends the request, as far as it is known.

    Returns None for the server's own pages and for clients that are not pages. Schemes are not compared,
    because a proxy may end TLS.
    """
    headers = request.headers
    origin = headers.get("Origin")
    if origin is not None:
        authority = origin.lower().partition("://")[2]
        return None if authority and authority == headers.get("Host", "").lower() else origin
    is_link = headers.get("Sec-Fetch-Dest") == "document"  # a link that a person follows
    is_foreign = headers.get("Sec-Fetch-Site") in _FOREIGN_SITES and not is_link
    return "another site" if is_foreign else None
