"""The part of a server that answers clients: this process, or API processes."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from socket import socket

from loong.engine.client import EngineLimits
from loong.engine.faults import WorkerFaults
from loong.launcher.serve.api_process import ApiProcessConfig
from loong.launcher.serve.api_processes import Shown, api_processes
from loong.launcher.serve.build import Served
from loong.launcher.serve.config import ServeConfig
from loong.launcher.serve.front import Front, front_here
from loong.lending.engine_room import Loan
from loong.observability.worker_traces import WorkerTraces
from loong.server.app import create_api
from loong.server.cluster import Cluster
from loong.server.cluster_app import add_cluster, cluster_of, create_cluster_app
from loong.server.engines.app import SeveralEngines, add_engines, create_engines_app
from loong.server.local_engine import LocalEngineClient
from loong.server.metrics.loans import LoanCollector
from loong.server.remote.forwarding import RemoteCluster
from loong.server.text.tokenizer import Tokenizer


def front_of(served: Served, tokenizer: Tokenizer, listener: socket) -> AbstractAsyncContextManager[Front]:
    """Return the context of the part that answers clients on a bound socket."""
    config, engine = served.prepared.config, served.engine
    cluster = cluster_of_engine(served)
    client = client_of_engine(served, cluster)
    has_spans = served.observers.spans is not None
    if config.num_api_servers == 1:
        app = create_api(client, tokenizer, config.server, cluster.registry, has_spans=has_spans)
        add_cluster(app, cluster)
        return front_here(app, cluster.admission, listener)
    return api_processes(
        partial(api_process_config, config, engine.limits, has_spans=has_spans),
        config.num_api_servers,
        client,
        Shown(create_cluster_app(cluster), cluster.registry, cluster.admission),
        listener,
        served.executor.fail,
    )


def front_of_several(
    config: ServeConfig,
    several: SeveralEngines,
    tokenizer: Tokenizer,
    listener: socket,
    fail: Callable[[BaseException], None],
) -> AbstractAsyncContextManager[Front]:
    """Return the same for several engines. `fail` is called if an API process cannot be replaced."""
    client = LocalEngineClient(several.router, several.admission, several.router)
    has_spans = config.otlp_traces_endpoint is not None
    if config.num_api_servers == 1:
        app = create_api(client, tokenizer, config.server, several.registry, has_spans=has_spans)
        add_engines(app, several)
        return front_here(app, several.admission, listener)
    return api_processes(
        partial(api_process_config, config, several.router.limits, has_spans=has_spans),
        config.num_api_servers,
        client,
        Shown(create_engines_app(several), several.registry, several.admission),
        listener,
        fail,
    )


def cluster_of_engine(served: Served, loans: Callable[[], Sequence[Loan]] | None = None) -> Cluster:
    """Return the context of the routes that show an engine of this process, with its loans, if it lends."""
    config = served.prepared.config
    tracing = None if config.trace_dir is None else WorkerTraces(served.executor, config.trace_dir)
    faults = _faults(served) if config.allows_faults else None
    cluster = cluster_of(served.engine, config.server, tracing, served.observers, faults)
    if loans is None:
        return cluster
    cluster.registry.register(LoanCollector(config.server.served_model_name, config.server.engine_id, loans))
    return replace(cluster, loans=loans)


def client_of_engine(served: Served, cluster: Cluster) -> LocalEngineClient:
    """Return the client of an engine of this process."""
    return LocalEngineClient(served.engine, cluster.admission, served.observers.spans)


def api_process_config(
    config: ServeConfig, limits: EngineLimits, socket_path: str, *, has_spans: bool
) -> ApiProcessConfig:
    """Return the configuration of an API process."""
    return ApiProcessConfig(
        config.server,
        limits,
        str(config.tokenizer_folder),
        tuple(config.model.eos_token_ids),
        RemoteCluster(socket_path, has_dashboard=True, has_spans=has_spans),
        config.log_format,
    )


def _faults(served: Served) -> WorkerFaults:
    restarts = served.executor.restarts
    assert restarts is not None, "lost instances of a server start again"
    return WorkerFaults(restarts.processes_of, lambda: served.engine.snapshot().pools)
