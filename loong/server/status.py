"""The server's status: health, version, load, metrics, trace and models."""

import asyncio
import time

from aiohttp import web
from msgspec import UNSET

import loong
from loong.engine.health import HealthState
from loong.server.answers.status import HealthStatus, Load, LoanStatus, Model, ModelList, Version
from loong.server.api.errors import ApiError
from loong.server.api.json_bodies import json_response
from loong.server.cluster import CLUSTER, MAX_UNREAD_TRACES, Cluster
from loong.server.context import SERVER
from loong.server.metrics.prometheus import exposition
from loong.server.metrics.trace import chrome_trace


async def health(http: web.Request) -> web.Response:
    """Return 200 while an instance serves and requests are admitted, else a 503 with the reason.

    A server is degraded if some of its instances do not serve; the answer names them.
    """
    cluster = http.app[CLUSTER]
    found = cluster.engine.health()
    if not found.is_alive:
        raise ApiError(503, found.message, "unhealthy")
    if cluster.admission.is_closed:
        raise ApiError(503, "the server is shutting down", "unhealthy")
    return json_response(
        HealthStatus(
            "ok" if found.state is HealthState.OK else "degraded",
            UNSET if found.message == "ok" else found.message,
            {str(i): trouble for i, trouble in sorted(found.troubles.items())} or UNSET,
            loans=loans_of(cluster) or UNSET,
        )
    )


def loans_of(cluster: Cluster) -> list[LoanStatus]:
    """Return the loans of an engine, as others see them."""
    now = cluster.engine.snapshot().now
    return [
        LoanStatus(loan.creditor_id, loan.debtor_id, loan.num_tokens, round(now - loan.since, 3), loan.reason)
        for loan in cluster.loans()
    ]


async def version(http: web.Request) -> web.Response:  # noqa: ARG001 (a handler takes a request)
    """Return the version of loong."""
    return json_response(Version(loong.__version__))


async def load(http: web.Request) -> web.Response:
    """Return the number of requests in flight."""
    return json_response(Load(http.app[CLUSTER].admission.num_in_flight))


async def metrics(http: web.Request) -> web.Response:
    """Return all metrics, in Prometheus' text format, or in OpenMetrics if the client asks for it."""
    text, content_type = exposition(http.app[CLUSTER].registry, http.headers.get("Accept", ""))
    return web.Response(body=text, headers={"Content-Type": content_type})


async def trace(http: web.Request) -> web.Response:
    """Return the last minutes of the cluster as a trace for Perfetto."""
    cluster = http.app[CLUSTER]
    if cluster.unread_traces.locked():
        message = f"{MAX_UNREAD_TRACES} clients have yet to read a trace, and no more may"
        raise ApiError(503, message, "too_many_traces")
    async with cluster.unread_traces:
        async with cluster.one_trace:
            written = await asyncio.to_thread(chrome_trace, cluster.engine.history())
        response = web.Response(body=written, content_type="application/json")
        await response.prepare(http)
        try:
            async with asyncio.timeout(cluster.settings.write_timeout):
                await response.write_eof()
        except TimeoutError:
            if http.transport is not None:
                http.transport.abort()
    return response


async def models(http: web.Request) -> web.Response:
    """Return the served model, once for each of its names."""
    names = http.app[SERVER].settings.served_model_names
    return json_response(ModelList([_model_card(http, name) for name in names]))


async def model(http: web.Request) -> web.Response:
    """Return one model by its name."""
    name = http.match_info["model"]
    http.app[SERVER].check_model(name)
    return json_response(_model_card(http, name))


def _model_card(http: web.Request, name: str) -> Model:
    return Model(name, int(time.time()), "loong", http.app[SERVER].engine.limits.max_model_len)
