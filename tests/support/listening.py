"""A server over a scripted engine, on a real socket with the production runner."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from socket import socketpair
from tempfile import TemporaryDirectory

import pytest
from aiohttp import web
from scripted_engine import Serving

from loong.engine.client import EngineInterface
from loong.engine.faults import WorkerFaults
from loong.model.tiny import CONFIG, tiny_model
from loong.server.api.listen import bound_socket, serve
from loong.server.app import create_app, create_remote_app
from loong.server.cluster import Cluster
from loong.server.cluster_app import cluster_of, create_cluster_app, serve_cluster
from loong.server.local_engine import LocalEngineClient
from loong.server.metrics.request_observers import RequestObservers
from loong.server.remote.client import RemoteEngineClient
from loong.server.remote.connection import ApiConnection
from loong.server.remote.forwarding import RemoteCluster
from loong.server.settings import ServerSettings
from loong.server.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return the built-in one, in which the token id of a byte is the byte."""
    return Tokenizer.from_folder(tiny_model(tmp_path_factory.mktemp("models")), CONFIG.eos_token_ids)


@pytest.fixture
def serving(tokenizer: Tokenizer) -> Serving:
    """Return a server on a real socket with the production runner; the context gives its address."""
    return serving_with(tokenizer)


@pytest.fixture(params=["with its engine", "apart from its engine"])
def serving_anywhere(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Serving:
    """Return the same, and one that talks to its engine as an API process does."""
    return serving_with(tokenizer, is_apart=request.param.startswith("apart"))


ANY_ADDRESS = "0.0.0.0"
BESIDE_ITS_ENGINE = pytest.mark.parametrize("serving", ["with its engine"], indirect=True)


def serving_with(tokenizer: Tokenizer, *, is_apart: bool = False) -> Serving:
    """Return the function that makes such a server; its context gives the address."""

    @asynccontextmanager
    async def listen(
        engine: EngineInterface,
        request_observers: RequestObservers | None = None,
        faults: WorkerFaults | None = None,
        **settings: object,
    ) -> AsyncIterator[str]:
        chosen = ServerSettings("tiny", **settings)  # type: ignore[arg-type]
        async with AsyncExitStack() as stack:
            if is_apart:
                cluster = cluster_of(engine, chosen, None, request_observers, faults)
                app = await _app_apart(engine, tokenizer, cluster, stack)
            else:
                app = create_app(engine, tokenizer, chosen, None, request_observers, faults)
            listener = stack.enter_context(
                bound_socket(chosen.host if chosen.host == ANY_ADDRESS else "127.0.0.1", 0)
            )
            runner = await serve(app, listener, shutdown_timeout=1.0)
            stack.push_async_callback(runner.cleanup)
            yield "http://{}:{}".format(*runner.addresses[0])

    return listen


async def _app_apart(
    engine: EngineInterface, tokenizer: Tokenizer, cluster: Cluster, stack: AsyncExitStack
) -> web.Application:
    """Return an application over a channel to the engine and a socket with the cluster's state."""
    path = Path(stack.enter_context(TemporaryDirectory())) / "cluster"
    request_observers = cluster.request_observers
    cluster_runner = await serve_cluster(create_cluster_app(cluster), path, shutdown_timeout=1.0)
    stack.push_async_callback(cluster_runner.cleanup)
    has_spans = request_observers is not None and request_observers.spans is not None
    local = LocalEngineClient(
        engine, cluster.admission, request_observers.spans if request_observers is not None else None
    )
    connection, client = ApiConnection(local, cluster.admission), RemoteEngineClient(engine.limits)
    ours, theirs = socketpair()
    await connection.open(ours)
    await client.open(theirs)
    stack.push_async_callback(connection.has_ended.wait)
    stack.callback(client.close)
    remote_cluster = RemoteCluster(
        str(path), has_dashboard=request_observers is not None, has_spans=has_spans
    )
    return create_remote_app(client, tokenizer, cluster.settings, cluster.registry, remote_cluster)
