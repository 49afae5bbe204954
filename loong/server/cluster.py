"""The shared context of handlers that show the cluster, in the engine's process."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry

from loong.engine.client import ClusterView, Tracing
from loong.engine.faults import WorkerFaults
from loong.lending.engine_room import Loan
from loong.server.admission import Admission
from loong.server.metrics.request_observers import RequestObservers
from loong.server.settings import ServerSettings

MAX_UNREAD_TRACES = 4


@dataclass(frozen=True, slots=True)
class Cluster:
    """An engine, the requests that wait for it, and its metrics."""

    engine: ClusterView
    admission: Admission
    settings: ServerSettings
    registry: CollectorRegistry
    tracing: Tracing | None = None
    request_observers: RequestObservers | None = None
    faults: WorkerFaults | None = None  # None: no fault can be injected
    loans: Callable[[], Sequence[Loan]] = tuple  # of an engine among others
    one_trace: asyncio.Lock = field(default_factory=asyncio.Lock)  # a trace may have hundreds of megabytes
    unread_traces: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UNREAD_TRACES))


CLUSTER = web.AppKey("cluster", Cluster)
