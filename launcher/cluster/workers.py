"""The workers of a cluster on one host or several: started together, watched, and ended with this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.executor.workers import WorkersExecutor
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.network import cluster_network
from loong.launcher.cluster.starter import WorkerStarter
from loong.launcher.cluster.worker_processes import WorkerProcesses
from loong.launcher.cluster.worker_settings import WorkerSettings
from loong.processes.child_processes import guarded


@asynccontextmanager
async def workers_of(
    config: ClusterConfig,
    starter: WorkerStarter,
    lookahead: LookaheadMargin | None = None,
    *,
    backoff: Backoff | None = None,
) -> AsyncIterator[WorkersExecutor]:
    """Start every worker, wait until all are ready, and yield their executor; at the end none is left.

    The executor predicts the ends of batches with a margin of `lookahead`, or never (None). With `backoff`,
    an instance that is lost from then on is started again, and instances can be added and removed.

    Raises `ClusterError` with the worker's own words if one cannot start.
    """
    with ExitStack() as stack:
        network, head_address = None, starter.host(0).address
        if head_address is not None:
            network = stack.enter_context(cluster_network(head_address))
        settings = WorkerSettings(config, starter, network)
        workers = WorkerProcesses(
            starter, settings, config.first(config.most_instances), backoff or Backoff()
        )
        restarts = None if backoff is None else workers.restarts
        executor = WorkersExecutor(settings.endpoints(), lookahead, config.heartbeat, restarts)
        is_ready = False
        tasks = [
            guarded(executor.read_reports(), executor.fail),
            guarded(executor.watch_silence(), executor.fail),
        ]
        try:
            workers.start(executor)
            await executor.members.ready
            is_ready = True
            yield executor
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)  # they watch sockets, which are closed next
            workers.forget()
            executor.shut_down()
            executor.close()
            if not is_ready:  # workers that are loading do not listen yet, and have nothing to lose
                workers.kill()
            await workers.stop()
