"""Forwards requests about the cluster to the process of an engine, over a Unix socket."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from yarl import URL

from loong.server.answers.status import HealthStatus
from loong.server.api.errors import ApiError
from loong.server.api.json_bodies import json_response
from loong.server.cluster_app import cluster_routes


@dataclass(frozen=True, slots=True)
class RemoteCluster:
    """The address of the engine's process, and the routes that it has."""

    socket_path: str
    has_dashboard: bool
    has_spans: bool


_PROBES = frozenset({"/health", "/ping"})
_PROBE_SECONDS = 5.0  # timeout of a health probe
_SENT = ("Accept", "Content-Type", "Content-Encoding", "Content-Length")
_KEPT = (
    "Content-Type",
    "Content-Length",
    "Cache-Control",
    "Content-Security-Policy",
    "X-Accel-Buffering",
    "X-Content-Type-Options",
)
_ENGINE = web.AppKey("engine", ClientSession)
_SOCKET = web.AppKey("socket", Path)


def add_forwarding(app: web.Application, cluster: RemoteCluster) -> None:
    """Add the cluster's routes to an application."""

    async def connect(app: web.Application) -> AsyncIterator[None]:
        connector = UnixConnector(cluster.socket_path, limit=0)  # a dashboard page keeps its connection
        async with ClientSession(connector=connector, auto_decompress=False) as session:
            app[_ENGINE] = session
            yield

    app[_SOCKET] = Path(cluster.socket_path)
    app.cleanup_ctx.append(connect)
    routes = cluster_routes(has_dashboard=cluster.has_dashboard)
    app.add_routes([web.RouteDef(r.method, r.path, forward, r.kwargs) for r in routes])


async def forward(http: web.Request) -> web.StreamResponse:
    """Forward a request to the engine's process and stream its answer. An error is raised in this process.

    Requests for tokens go another way, so a server whose socket is gone is degraded, not dead.
    """
    seconds = _PROBE_SECONDS if http.path in _PROBES else None
    try:
        return await pass_on(http, http.app[_ENGINE], seconds)
    except (ClientError, TimeoutError) as error:
        return _without_engine(http, error)


async def pass_on(
    http: web.Request, session: ClientSession, seconds: float | None = None, *, but: tuple[str, ...] = ()
) -> web.StreamResponse:
    """Pass a request on to another process, all `but` some fields of its query, and stream its answer.

    Raises `ApiError` for an answer that is an error, and the client's errors if there is no answer within
    `seconds`. An answer that ends early ends the connection.
    """
    url = URL(f"http://engine{http.rel_url.raw_path_qs}", encoded=True)
    if any(name in http.query for name in but):
        url = url.without_query_params(*but)
    headers = {name: http.headers[name] for name in _SENT if name in http.headers}
    body = http.content if http.can_read_body else None
    timeout, response = ClientTimeout(total=seconds), None
    try:
        async with session.request(http.method, url, headers=headers, timeout=timeout, data=body) as answer:
            if answer.status >= 400 and http.method != "HEAD":
                error = (await answer.json())["error"]
                raise ApiError(answer.status, error["message"], error["code"], error["param"])
            kept = {name: answer.headers[name] for name in _KEPT if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(http)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
    except (ClientError, TimeoutError):
        if response is None:
            raise
        if http.transport is not None:
            http.transport.abort()  # a clean end would look like a complete answer
    return response


def _without_engine(http: web.Request, error: BaseException) -> web.Response:
    """Return the health of this process, or raise a 503: the engine's process cannot be reached."""
    socket = http.app[_SOCKET]
    if socket.exists():
        raise ApiError(503, "the engine's process does not answer", "unhealthy") from error
    message = f"the run directory {socket.parent} is gone, so the state of the cluster cannot be shown"
    if http.path not in _PROBES:
        raise ApiError(503, message, "unhealthy") from error
    return json_response(HealthStatus("degraded", message))
