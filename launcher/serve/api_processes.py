"""Several processes that answer clients of one engine, on one port.

Each accepts from a listening socket of its own, and the system spreads connections among the sockets. With
one socket for all, the process that is awake would take most connections of a burst and keep them. The
engine's process owns the sockets, so a replacement takes over the connections that wait at a process that
dies.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket, socketpair

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from loong.core.errors import ClusterError
from loong.engine.client import EngineClient
from loong.executor.recovery import Backoff, Failures
from loong.launcher.cluster.run_directory import run_directory
from loong.launcher.serve.api_process import ApiProcessConfig
from loong.launcher.serve.front import LAST_WORDS_SECONDS, Front
from loong.processes.child_processes import ChildProcess, guarded, how_it_ended, stop
from loong.processes.fork_server import ForkServer
from loong.server.admission import Admission
from loong.server.api.listen import sibling_sockets
from loong.server.cluster_app import serve_cluster
from loong.server.remote.connection import ApiConnection

logger = logging.getLogger(__name__)

_PROCESS = "loong.launcher.serve.api_process"
_START_SECONDS = 120.0


class ApiProcesses:
    """A `Front` of processes. One that ends is replaced, and its requests are aborted."""

    def __init__(
        self,
        config: ApiProcessConfig,
        engine: EngineClient,
        admission: Admission,
        listeners: Sequence[socket],
        metrics_folder: Path,
    ) -> None:
        self.admission = admission
        self._config, self._engine, self._listeners = config, engine, listeners
        self._fork_server = ForkServer(_PROCESS, {"PROMETHEUS_MULTIPROC_DIR": str(metrics_folder)})
        self._running: dict[int, tuple[ChildProcess, ApiConnection]] = {}  # by number
        self._failures = Failures(Backoff())
        self._is_stopping = False
        self._watching: list[asyncio.Task[None]] = []

    async def start(self, fail: Callable[[BaseException], None]) -> None:
        """Start one for each listener; from then on, call `fail` if one cannot be replaced.

        Raises `ClusterError` if one does not start.
        """
        numbers = range(len(self._listeners))
        for error in await asyncio.gather(*map(self._start, numbers), return_exceptions=True):
            if error is not None:
                raise error
        self._watching += [guarded(self._replace(number), fail) for number in self._running]

    def report_limits(self) -> None:
        """Report the engine's present limits to all processes."""
        for _, connection in self._running.values():
            connection.report_limits()

    async def stop_listening(self) -> None:
        """Refuse new connections."""
        self._is_stopping = True
        for listener in self._listeners:
            listener.close()
        for _, connection in self._running.values():
            connection.stop_listening()

    async def stop(self) -> None:
        """End all processes; each has a moment for its last messages."""
        self._is_stopping = True
        for task in self._watching:
            task.cancel()
        for _, connection in self._running.values():
            connection.close()
        await asyncio.gather(*(stop(process) for process, _ in self._running.values()))
        self._fork_server.close()

    async def _start(self, number: int) -> None:
        ours, theirs = socketpair()
        with theirs:
            descriptors = (self._listeners[number].fileno(), theirs.fileno())
            process = self._fork_server.start(self._config, descriptors)
        connection = ApiConnection(self._engine, self.admission)
        await connection.open(ours)
        self._running[number] = process, connection
        waits = [asyncio.create_task(e.wait()) for e in (connection.is_listening, connection.has_ended)]
        await asyncio.wait(waits, timeout=_START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if not connection.is_listening.is_set():
            is_late = not connection.has_ended.is_set()
            connection.close()
            await stop(process)
            late = f"was not ready within {_START_SECONDS:g} s"
            how = late if is_late else how_it_ended(process.returncode or 0)
            raise ClusterError(f"API process {number} did not start: it {how}")
        if self._is_stopping:  # since; its listener is a copy
            connection.stop_listening()

    async def _replace(self, number: int) -> None:
        """Replace each process that ends, until the server stops."""
        while True:
            process, connection = self._running[number]
            await connection.watch()
            await stop(process)
            if self._is_stopping:
                return
            how = how_it_ended(process.returncode or 0)
            logger.error("API process %d %s; its requests are aborted, and another is started", number, how)
            await self._start_again(number)

    async def _start_again(self, number: int) -> None:
        """Start a process until it answers. Raises `ClusterError` if it fails too often in a row."""
        delay = self._failures.fail(number)
        while delay is not None:
            await asyncio.sleep(delay)
            try:
                await self._start(number)
            except ClusterError as error:
                delay = self._failures.fail(number)
                if delay is None or self._is_stopping:
                    raise
                logger.error("%s; the next attempt is in %g s", error, delay)  # noqa: TRY400 - words enough
            else:
                self._failures.join(number)
                return
        raise ClusterError(f"API process {number} has failed again and again")


@dataclass(frozen=True, slots=True)
class Shown:
    """The application that shows the cluster to API processes, and the metrics and admission of all."""

    app: web.Application
    registry: CollectorRegistry
    admission: Admission


@asynccontextmanager
async def api_processes(
    make_config: Callable[[str], ApiProcessConfig],
    num_processes: int,
    engine: EngineClient,
    shown: Shown,
    listener: socket,
    fail: Callable[[BaseException], None],
) -> AsyncIterator[Front]:
    """Answer clients by `num_processes` processes while the context lasts.

    `make_config` is given the path of the socket that serves the cluster's state. Raises `ClusterError` if a
    process does not start; `fail` is called if one cannot be replaced later.
    """
    with (
        run_directory() as directory,
        sibling_sockets(listener, num_processes - 1) as others,
    ):
        listeners = (listener, *others)
        metrics_folder, path = directory.path, directory.path / "cluster"
        MultiProcessCollector(shown.registry, path=str(metrics_folder))  # type: ignore[no-untyped-call]
        runner = await serve_cluster(shown.app, path, shutdown_timeout=LAST_WORDS_SECONDS)
        processes = ApiProcesses(make_config(str(path)), engine, shown.admission, listeners, metrics_folder)
        try:
            await processes.start(fail)
            yield processes
        finally:
            await runner.cleanup()  # first, so that pages that watch the cluster hold nothing up
            await processes.stop()
