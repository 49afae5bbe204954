"""The process of one of several engines: it plans for its instances, and answers the server's process."""

import asyncio
import logging
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from socket import socket

import uvloop

from loong.core.errors import LoongError
from loong.core.events import Drained
from loong.core.grammar import FIRST_GRAMMARS
from loong.grammar.availability import is_installed
from loong.hardware.gpus import visible_devices
from loong.launcher.cluster.worker_fork_server import NOTHING_MORE, worker_fork_server
from loong.launcher.serve.build import Served, build
from loong.launcher.serve.chosen_front import client_of_engine, cluster_of_engine
from loong.launcher.serve.config import ServeConfig
from loong.launcher.serve.front import LAST_WORDS_SECONDS
from loong.launcher.serve.lending import EngineLending, LendingConfig
from loong.launcher.serve.prepare import prepare
from loong.launcher.serve.serving import log_failure
from loong.launcher.serve.state_dump import StateDump
from loong.launcher.serve.status_line import log_status
from loong.processes.child import config_of, end_with_parent, leave_signals_to_parent, name_process
from loong.processes.child_processes import guarded
from loong.processes.fork_server import ForkServer
from loong.processes.logs import log_to_stderr
from loong.processes.stacks import stacks_on_request
from loong.runs.outputs import make_folder
from loong.server.cluster_app import create_cluster_app, serve_cluster
from loong.server.remote.connection import ASK_SECONDS, ApiConnection

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineProcessConfig:
    """The configuration of an engine's process, and the path of the socket that shows its cluster.

    `lending` is there if it lends and borrows room.
    """

    serve: ServeConfig
    socket_path: str
    lending: LendingConfig | None = None


def main() -> None:
    """Serve until the server's process closes the channel, whose descriptor is the argument.

    Signals that end a service are handled by the server's process.
    """
    leave_signals_to_parent()
    stdin = FileIO(sys.stdin.fileno(), closefd=False)  # a buffer has a lock, which a reading thread holds
    config = config_of(stdin.readline(), EngineProcessConfig)
    engine_id, cluster = config.serve.server.engine_id, config.serve.cluster
    name_process(f"loong-engine-{engine_id}"[:15])
    log_to_stderr(config.serve.log_format, cluster.log_source)
    with ExitStack() as stack:
        fork_server = None
        if cluster.hosts == "local":
            num_ranks = cluster.world_size * cluster.tp_size
            first = engine_id * num_ranks
            environment = NOTHING_MORE if cluster.device == "cpu" else visible_devices(first, num_ranks)
            fork_server = stack.enter_context(closing(worker_fork_server(environment)))
        end_with_parent(stdin)
        channel = socket(fileno=int(sys.argv[1]))
        sys.exit(uvloop.run(_serve(config, channel, fork_server)))


async def _serve(config: EngineProcessConfig, channel: socket, fork_server: ForkServer | None) -> int:
    """Start the workers and serve. Return 1 if the engine could not start, or failed.

    `fork_server` is a `worker_fork_server` (None: workers are on other hosts).
    """
    dump = StateDump()
    with stacks_on_request(f"engine {config.serve.server.engine_id}", dump.request):
        try:
            if config.serve.trace_dir is not None:
                make_folder("--trace-dir", config.serve.trace_dir)
            async with build(prepare(config.serve), fork_server) as served:
                dump.snapshot = served.engine.snapshot
                return await _run(served, channel, config)
        except LoongError as error:
            logger.error("%s", error)  # noqa: TRY400 - words enough
            return 1


async def _run(served: Served, channel: socket, config: EngineProcessConfig) -> int:
    """Run the engine until it fails, or until the server's process closes the channel."""
    engine, executor = served.engine, served.executor
    lending = None if config.lending is None else EngineLending(served, config.lending)
    cluster = cluster_of_engine(served, None if lending is None else lending.loans)
    connection = ApiConnection(client_of_engine(served, cluster), cluster.admission)
    running = asyncio.create_task(engine.run())
    running.add_done_callback(log_failure)
    path, others = Path(config.socket_path), set[asyncio.Task[None]]()
    if lending is not None:
        others.add(guarded(lending.run(), executor.fail))
    runner = await serve_cluster(create_cluster_app(cluster), path, shutdown_timeout=LAST_WORDS_SECONDS)
    served.scaling.report_limit = connection.report_limits
    await connection.open(channel)  # from now on requests come
    if is_installed():
        executor.calls.prepare_first_grammars(FIRST_GRAMMARS)
    logger.info("serves %d instances", served.prepared.config.cluster.num_instances)
    others |= {asyncio.create_task(log_status(engine)), asyncio.create_task(_ping(connection))}
    ended = asyncio.create_task(connection.has_ended.wait())
    try:
        await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*others, ended):
            task.cancel()
        await runner.cleanup()
        connection.close()
        executor.post(Drained())
        await asyncio.wait([running])
    return 0 if running.exception() is None else 1


async def _ping(connection: ApiConnection) -> None:
    """Show the server's process that this one is alive."""
    while True:
        connection.ping()
        await asyncio.sleep(ASK_SECONDS)
