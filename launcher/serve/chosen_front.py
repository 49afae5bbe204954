"""The part of a server that answers clients: this process, or API processes."""

from contextlib import AbstractAsyncContextManager
from socket import socket

from loong.engine.faults import WorkerFaults
from loong.launcher.serve.api_process import ApiProcessConfig
from loong.launcher.serve.api_processes import api_processes
from loong.launcher.serve.build import Served
from loong.launcher.serve.front import Front, front_here
from loong.observability.worker_traces import WorkerTraces
from loong.server.app import create_app
from loong.server.cluster_app import cluster_of
from loong.server.local_engine import LocalEngineClient
from loong.server.remote.forwarding import RemoteCluster


def front_of(served: Served, listener: socket) -> AbstractAsyncContextManager[Front]:
    """Return the context of the part that answers clients on a bound socket."""
    config, tokenizer = served.prepared.config, served.prepared.tokenizer
    engine, executor, observers = served.engine, served.executor, served.observers
    tracing = None if config.trace_dir is None else WorkerTraces(executor, config.trace_dir)
    faults = _faults(served) if config.allows_faults else None
    if config.num_api_servers == 1:
        app = create_app(engine, tokenizer, config.server, tracing, observers, faults)
        return front_here(app, listener)
    cluster = cluster_of(engine, config.server, tracing, observers, faults)
    client = LocalEngineClient(engine, cluster.admission, observers.spans)

    def process_config(socket_path: str) -> ApiProcessConfig:
        return ApiProcessConfig(
            config.server,
            engine.limits,
            str(config.tokenizer_folder),
            tuple(config.model.eos_token_ids),
            RemoteCluster(socket_path, has_dashboard=True, has_spans=observers.spans is not None),
            config.log_format,
        )

    return api_processes(process_config, config.num_api_servers, client, cluster, listener, executor.fail)


def _faults(served: Served) -> WorkerFaults:
    restarts = served.executor.restarts
    assert restarts is not None, "lost instances of a server start again"
    return WorkerFaults(restarts.processes_of, lambda: served.engine.snapshot().pools)
