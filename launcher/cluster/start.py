"""Worker processes on this machine: started together, watched, and ended with this process."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, closing

from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.executor.workers import WorkersExecutor
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.ray_cluster import set_environment
from loong.launcher.cluster.run_directory import run_directory
from loong.launcher.cluster.starter import LocalStarter
from loong.launcher.cluster.worker_fork_server import worker_fork_server
from loong.launcher.cluster.workers import workers_of
from loong.processes.fork_server import ForkServer


@asynccontextmanager
async def local_workers(
    config: ClusterConfig,
    lookahead: LookaheadMargin | None = None,
    fork_server: ForkServer | None = None,
    *,
    backoff: Backoff | None = None,
) -> AsyncIterator[WorkersExecutor]:
    """Start every worker on this host, as `workers_of` does.

    `fork_server` is a `worker_fork_server` (None: one for these workers).
    """
    with ExitStack() as stack:
        directory = stack.enter_context(run_directory())
        if fork_server is None:
            fork_server = stack.enter_context(closing(worker_fork_server()))
        starter = LocalStarter(fork_server, directory)
        async with workers_of(config, starter, lookahead, backoff=backoff) as executor:
            yield executor


def cluster_workers(
    config: ClusterConfig,
    lookahead: LookaheadMargin,
    fork_server: ForkServer | None = None,
    *,
    backoff: Backoff | None = None,
) -> AbstractAsyncContextManager[WorkersExecutor]:
    """Return the context of the workers of a cluster, on this host or on those of Ray.

    `fork_server` is for workers on this host, as in `local_workers`.
    """
    if config.hosts == "local":
        return local_workers(config, lookahead, fork_server, backoff=backoff)
    set_environment()
    from loong.launcher.cluster.ray_hosts import ray_workers  # not at the top: Ray is optional

    return ray_workers(config, lookahead, backoff=backoff)
