"""The routes that show a server of several engines, in the process of its router."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from aiohttp import ClientError, web
from msgspec import UNSET
from prometheus_client import CollectorRegistry, ProcessCollector

from loong.core.errors import InvalidRequestError
from loong.engine.faults import NO_MANAGER, FaultKind, InTurn
from loong.server.admission import Admission
from loong.server.answers.status import (
    EngineHealth,
    HealthStatus,
    InjectedFault,
    Load,
    Status,
)
from loong.server.api.body import Bodies
from loong.server.api.errors import ApiError, bad_request
from loong.server.api.json_bodies import json_response
from loong.server.api.middleware import answer_errors
from loong.server.api.parsing import check, read_json
from loong.server.cluster_app import cluster_routes
from loong.server.engines.metrics import JoinedMetrics, RouterCollector
from loong.server.engines.processes import Engines, EngineSessions, EngineState, Page
from loong.server.engines.router import EngineRouter
from loong.server.fault_injection import FaultFields, check_allowed, not_live
from loong.server.metrics.prometheus import exposition
from loong.server.remote.forwarding import pass_on
from loong.server.settings import ServerSettings

_AWAY = {
    EngineState.STARTING: EngineHealth("starting", "has not started yet"),
    EngineState.RESTARTING: EngineHealth("restarting", "was lost and is being started again"),
    EngineState.QUARANTINED: EngineHealth(
        "quarantined", "is quarantined: it has failed, and is not started again"
    ),
}
_ANY = frozenset({"/", "/dashboard", "/dashboard/page/{name}"})  # the same at all engines


@dataclass(frozen=True, slots=True)
class SeveralEngines:
    """The engines of a server, their router, and the requests in flight."""

    engines: Engines
    router: EngineRouter
    admission: Admission
    settings: ServerSettings
    registry: CollectorRegistry
    metrics: JoinedMetrics
    sessions: EngineSessions
    allows_faults: bool = False
    in_turn: InTurn = field(default_factory=lambda: InTurn("engine"))


ENGINES = web.AppKey("engines", SeveralEngines)


def several_engines(
    engines: Engines, router: EngineRouter, settings: ServerSettings, *, allows_faults: bool = False
) -> SeveralEngines:
    """Return the context of the routes, with all counts at zero."""
    registry = CollectorRegistry()
    counts = RouterCollector(settings.served_model_name, router, lambda: engines.states.values())
    metrics = JoinedMetrics((ProcessCollector(registry=None), counts))
    registry.register(metrics)
    return SeveralEngines(
        engines,
        router,
        Admission(settings),
        settings,
        registry,
        metrics,
        EngineSessions(engines),
        allows_faults,
    )


def add_engines(app: web.Application, several: SeveralEngines) -> None:
    """Add the routes of `cluster_routes` to an application. What is one engine's own goes to that engine."""
    own = {
        "/health": health,
        "/ping": health,
        "/load": load,
        "/metrics": metrics,
        "/reset_prefix_cache": reset_prefix_cache,
        "/admin/faults": inject_fault,
    }
    app[ENGINES] = several
    app.cleanup_ctx.append(_sessions)
    for r in cluster_routes(has_dashboard=True):
        handler = own.get(r.path, to_any_engine if r.path in _ANY else to_engine)
        app.add_routes([web.RouteDef(r.method, r.path, handler, r.kwargs)])


def create_engines_app(several: SeveralEngines) -> web.Application:
    """Return an application for API processes, which check keys and count refusals themselves."""
    app = web.Application(middlewares=[answer_errors])
    add_engines(app, several)
    return app


async def health(http: web.Request) -> web.Response:
    """Return 200 while an engine serves, with the health of each, else a 503 with the reasons."""
    several = http.app[ENGINES]
    pages = await several.sessions.ask_all("GET", "/health")
    found = {
        engine_id: _health_of(state, pages.get(engine_id), several.engines.socket_path(engine_id))
        for engine_id, state in several.engines.states.items()
    }
    words = [f"engine {i} {one.message}" for i, one in found.items() if one.message is not UNSET]
    message = "; ".join(words)
    if not any(one.status in ("ok", "degraded") for one in found.values()):
        raise ApiError(503, message, "unhealthy")
    if several.admission.is_closed:
        raise ApiError(503, "the server is shutting down", "unhealthy")
    is_ok = all(one.status == "ok" for one in found.values())
    return json_response(
        HealthStatus(
            "ok" if is_ok else "degraded",
            message or UNSET,
            engines={str(engine_id): one for engine_id, one in found.items()},
        )
    )


def _health_of(state: EngineState, page: Page | None, socket: Path) -> EngineHealth:
    if state is not EngineState.OK:
        return _AWAY[state]
    if page is None and not socket.exists():  # requests for tokens go another way
        return EngineHealth("degraded", f"cannot be asked: the run directory {socket.parent} is gone")
    if page is None:
        return EngineHealth("dead", "does not answer")
    if page.status != 200:
        return EngineHealth("dead", f"cannot serve: {json.loads(page.body)['error']['message']}")
    status = msgspec.json.decode(page.body, type=HealthStatus)
    message = UNSET if status.message is UNSET else f"serves, but: {status.message}"
    return EngineHealth(status.status, message, status.instances, status.loans)


async def load(http: web.Request) -> web.Response:
    """Return the number of requests in flight at all engines."""
    return json_response(Load(http.app[ENGINES].admission.num_in_flight))


async def metrics(http: web.Request) -> web.Response:
    """Return the metrics of all engines as one."""
    several = http.app[ENGINES]
    pages = await several.sessions.ask_all("GET", "/metrics")
    for engine_id in several.sessions.serving_ids:  # since then, one may have been lost
        if (page := pages.get(engine_id)) is not None and page.status == 200:
            several.metrics.take(engine_id, page.body.decode())
    text, content_type = exposition(several.registry, http.headers.get("Accept", ""))
    return web.Response(body=text, headers={"Content-Type": content_type})


async def reset_prefix_cache(http: web.Request) -> web.Response:
    """Evict all KV that no request reads, at all engines. One that is being started has none."""
    several = http.app[ENGINES]
    several.router.forget_prefixes()
    pages = await several.sessions.ask_all("POST", "/reset_prefix_cache")
    if failed := [engine_id for engine_id, page in pages.items() if page is None or page.status != 200]:
        raise ApiError(503, f"engines {failed} did not answer; the others were reset", "engine_not_live")
    return json_response(Status("reset"))


async def inject_fault(http: web.Request) -> web.Response:
    """Inject a fault into an engine, or into an instance of it, and return which has it."""
    several = http.app[ENGINES]
    check_allowed(is_allowed=several.allows_faults)
    async with Bodies(several.settings).receive(http) as body:
        fields = check(read_json(body), FaultFields)
    if FaultKind(fields.fault) is FaultKind.KILL_MANAGER:
        if not several.engines.kill_manager():
            raise bad_request(NO_MANAGER, "fault")
        return json_response(InjectedFault(FaultKind.KILL_MANAGER))
    try:
        engine_id = several.in_turn.choose(fields.engine, several.sessions.serving_ids)
    except InvalidRequestError as error:
        raise not_live(error) from error
    if FaultKind(fields.fault) is FaultKind.KILL_ENGINE:
        several.engines.kill(engine_id)
        return json_response(InjectedFault(FaultKind.KILL_ENGINE, engine_id))
    forwarded = json.dumps(fields.model_dump(exclude={"engine"}, exclude_none=True)).encode()
    if (page := await several.sessions.ask(engine_id, "POST", "/admin/faults", forwarded)) is None:
        raise ApiError(503, f"engine {engine_id} does not answer", "engine_not_live")
    found = json.loads(page.body)
    if page.status >= 400:
        raise ApiError(page.status, found["error"]["message"], found["error"]["code"])
    return json_response(InjectedFault(FaultKind(found["fault"]), engine_id, found["instance"]))


async def to_engine(http: web.Request) -> web.StreamResponse:
    """Pass a request on to the engine that its query names: `?engine=0`."""
    several = http.app[ENGINES]
    numbers = several.engines.states.keys()
    named, last = http.query.get("engine"), max(numbers)
    if named is None or named not in map(str, numbers):
        what = "which engine?" if named is None else f"there is no engine {named!r}:"
        message = f"{what} this server has {len(numbers)}; name one by ?engine=0 to ?engine={last}"
        raise bad_request(message, "engine")
    return await _passed_on(http, int(named))


async def to_any_engine(http: web.Request) -> web.StreamResponse:
    """Pass a request on to the first engine that serves."""
    serving_ids = http.app[ENGINES].sessions.serving_ids
    if not serving_ids:
        raise ApiError(503, "no engine serves now", "engine_not_live")
    return await _passed_on(http, serving_ids[0])


async def _passed_on(http: web.Request, engine_id: int) -> web.StreamResponse:
    session = http.app[ENGINES].sessions.session(engine_id)
    try:
        return await pass_on(http, session, but=("engine",))
    except (ClientError, TimeoutError) as error:
        raise ApiError(503, f"engine {engine_id} does not answer", "engine_not_live") from error


async def _sessions(app: web.Application) -> AsyncIterator[None]:
    yield
    await app[ENGINES].sessions.close()
