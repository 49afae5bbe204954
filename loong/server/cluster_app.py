"""Routes that show the cluster, in the process of the engine."""

from collections.abc import Sequence
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector

from loong.engine.client import ClusterView, Tracing
from loong.engine.faults import WorkerFaults
from loong.server import fault_injection, prefix_cache, profiling, scaling, status
from loong.server.admission import Admission
from loong.server.api.middleware import answer_errors
from loong.server.api.sse import EVENT_WRITES, EventWrites
from loong.server.cluster import CLUSTER, Cluster
from loong.server.dashboard.routes import DASHBOARD_ROUTES, add_dashboard
from loong.server.metrics.cluster_metrics import ClusterCollector, CostModelCollector
from loong.server.metrics.prometheus import MetricFamilies
from loong.server.metrics.request_observers import RequestObservers
from loong.server.metrics.run_metrics import RunMetrics
from loong.server.settings import ServerSettings

_ROUTES = (
    web.get("/health", status.health),
    web.get("/ping", status.health),
    web.post("/ping", status.health),
    web.get("/load", status.load),
    web.get("/metrics", status.metrics),
    web.get("/trace", status.trace),
    web.post("/reset_prefix_cache", prefix_cache.reset_prefix_cache),
    web.post("/start_profile", profiling.start_profile),
    web.post("/stop_profile", profiling.stop_profile),
    web.post("/admin/faults", fault_injection.inject_fault),
    web.get("/admin/instances", scaling.instances),
    web.post("/admin/scale", scaling.scale),
)


def cluster_of(
    engine: ClusterView,
    settings: ServerSettings,
    tracing: Tracing | None = None,
    request_observers: RequestObservers | None = None,
    faults: WorkerFaults | None = None,
) -> Cluster:
    """Return the context of an engine in this process, with all counts at zero."""
    registry = CollectorRegistry()
    is_deferred = request_observers.is_deferred if request_observers is not None else lambda _: False
    registry.register(ClusterCollector(settings.served_model_name, engine, is_deferred))
    ProcessCollector(registry=registry)
    return Cluster(engine, Admission(settings), settings, registry, tracing, request_observers, faults)


def cluster_routes(*, has_dashboard: bool) -> Sequence[web.RouteDef]:
    """The routes that `add_cluster` serves."""
    return (*_ROUTES, *(DASHBOARD_ROUTES if has_dashboard else ()))


def add_cluster(app: web.Application, cluster: Cluster) -> None:
    """Add the cluster routes to an application."""
    app[CLUSTER], request_observers = cluster, cluster.request_observers
    app.add_routes(cluster_routes(has_dashboard=request_observers is not None))
    model_name = cluster.settings.served_model_name
    metrics = RunMetrics(MetricFamilies(cluster.registry, model_name))
    if request_observers is not None:
        cluster.registry.register(CostModelCollector(model_name, request_observers.errors))
        request_observers.plan_listeners.append(metrics.observe_plan)
        request_observers.runs.subscribe(
            lambda run: metrics.observe_run(run, request_observers.target_of(run))
        )
        add_dashboard(app, request_observers)


async def serve_cluster(app: web.Application, path: Path, *, shutdown_timeout: float) -> web.AppRunner:
    """Listen on a new Unix socket, and return the runner, whose `cleanup` ends it."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    return runner


def create_cluster_app(cluster: Cluster) -> web.Application:
    """Return an application for API processes, which check keys and count refusals themselves."""
    app = web.Application(middlewares=[answer_errors])
    app[EVENT_WRITES] = EventWrites()
    add_cluster(app, cluster)
    return app
