"""The processes of several engines: started together, watched, and started again when they end."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from socket import socketpair

from loong.core.errors import ClusterError
from loong.engine.client import EngineLimits
from loong.executor.recovery import Backoff, Failures
from loong.launcher.serve.config import ServeConfig
from loong.launcher.serve.engine_process import EngineProcessConfig
from loong.launcher.serve.lending import LendingConfig, LendingSupervisor
from loong.processes.child_processes import ChildProcess, how_it_ended, stop
from loong.processes.fork_server import ForkServer
from loong.server.engines.processes import EngineState
from loong.server.engines.router import EngineRouter
from loong.server.remote.client import RemoteEngineClient
from loong.server.remote.connection import ASK_SECONDS, MAX_UNANSWERED

logger = logging.getLogger(__name__)

_PROCESS = "loong.launcher.serve.engine_process"
_SPARE_START_SECONDS = 60.0  # for an engine, beyond the time that its workers have
_STOP_SECONDS = 15.0  # for an engine, which waits for its workers


class EngineProcesses:
    """Implements `Engines`. Requests of one that ends go on at others, and it is started again.

    `folder` is for the sockets that show their clusters. `when_lost` is called with the number of an engine.
    With `lending`, they lend each other room.
    """

    def __init__(
        self, configs: Sequence[ServeConfig], limits: EngineLimits, router: EngineRouter, folder: Path
    ) -> None:
        self._configs, self._limits, self._router, self._folder = configs, limits, router, folder
        self.when_lost: Callable[[int], None] = lambda _: None
        self.lending: LendingSupervisor | None = None
        self._num_starts = Counter[int]()
        self._fork_server = ForkServer(_PROCESS, {})
        self._running: dict[int, tuple[ChildProcess, RemoteEngineClient]] = {}
        self._states = dict.fromkeys(range(len(configs)), EngineState.STARTING)
        self._failures = Failures(Backoff())

    @property
    def states(self) -> Mapping[int, EngineState]:
        """The states of all engines."""
        return self._states

    def socket_path(self, engine_id: int) -> Path:
        """Return the path of the socket that serves the state of an engine's cluster."""
        return self._folder / f"engine-{engine_id}"

    def kill(self, engine_id: int) -> None:
        """Kill an engine's process at once, as a fault."""
        process, _ = self._running[engine_id]
        process.kill()

    def kill_manager(self) -> bool:
        """Kill the gManager of loans at once, as a fault. Return whether there is one."""
        return self.lending is not None and self.lending.kill_manager()

    async def start(self) -> None:
        """Start all engines. Raises `ClusterError` as soon as one does not start."""
        try:
            async with asyncio.TaskGroup() as group:
                for engine_id in self._states:
                    group.create_task(self._start(engine_id))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def watch(self) -> None:
        """Start each engine again that ends, until cancelled.

        One that fails too often in a row is quarantined. Raises `ClusterError` when all are.
        """
        async with asyncio.TaskGroup() as group:
            others = None if self.lending is None else group.create_task(self.lending.watch())
            await asyncio.gather(*map(self._keep, self._states))
            if others is not None:
                others.cancel()
        self._router.stop()
        raise ClusterError("all engines have failed again and again, and are quarantined")

    async def stop(self) -> None:
        """End all processes, at once those that do not serve yet."""
        for engine_id, (process, client) in self._running.items():
            client.close()
            if self._states[engine_id] is not EngineState.OK:
                process.kill()
        await asyncio.gather(*(stop(process, _STOP_SECONDS) for process, _ in self._running.values()))
        self._fork_server.close()
        if self.lending is not None:
            self.lending.stop()

    async def _start(self, engine_id: int) -> None:
        """Start an engine, and give it requests once it takes them. Raises `ClusterError` if it does not."""
        config, ready = self._configs[engine_id], asyncio.Event()

        def report_limit() -> None:
            ready.set()
            self._router.report_limit()

        client = RemoteEngineClient(self._limits, report_limit)
        ours, theirs = socketpair()
        with theirs:
            self._num_starts[engine_id] = epoch = self._num_starts[engine_id] + 1
            lending = None if self.lending is None else LendingConfig(str(self._folder), epoch)
            process_config = EngineProcessConfig(config, str(self.socket_path(engine_id)), lending)
            process = self._fork_server.start(process_config, (theirs.fileno(),))
        await client.open(ours)
        self._running[engine_id] = process, client
        seconds = config.cluster.start_timeout + config.calibration_time + _SPARE_START_SECONDS
        waits = [asyncio.create_task(event.wait()) for event in (ready, client.ended)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not ready.is_set():
            is_late = not client.ended.is_set()
            client.abandon()
            await stop(process, 0.0 if is_late else _STOP_SECONDS)
            how = f"was not ready within {seconds:g} s" if is_late else how_it_ended(process.returncode or 0)
            raise ClusterError(f"engine {engine_id} did not start: it {how}; the log has its words")
        self._router.join(engine_id, client)
        if self.lending is not None:
            cluster = config.cluster
            self.lending.join(engine_id, epoch, cluster.num_instances * cluster.kv_capacity)
        self._states[engine_id] = EngineState.OK

    async def _keep(self, engine_id: int) -> None:
        """Start an engine again whenever it ends, until it is quarantined."""
        while True:
            process, client = self._running[engine_id]
            await until_ended(engine_id, client)
            self._states[engine_id] = EngineState.RESTARTING
            self._router.lose(engine_id)
            self.when_lost(engine_id)
            if self.lending is not None:
                self.lending.lose(engine_id)
            process.kill()  # it may hang
            how = how_it_ended(await process.wait())
            logger.error(
                "engine %d %s; others go on with its requests, and it is started again", engine_id, how
            )
            if not await self._start_again(engine_id):
                self._states[engine_id] = EngineState.QUARANTINED
                logger.error("engine %d is quarantined: it has failed again and again", engine_id)
                return

    async def _start_again(self, engine_id: int) -> bool:
        """Start an engine until it serves. Return False if it fails too often in a row."""
        while (delay := self._failures.fail(engine_id)) is not None:
            await asyncio.sleep(delay)
            try:
                await self._start(engine_id)
            except ClusterError as error:
                logger.error("%s", error)  # noqa: TRY400 - words enough
            else:
                self._failures.join(engine_id)
                logger.info("engine %d serves again", engine_id)
                return True
        return False


async def until_ended(engine_id: int, client: RemoteEngineClient) -> None:
    """Return when an engine's process has closed its channel, or has long sent nothing."""
    num_silent, num_pings = 0, client.num_pings
    while not client.ended.is_set():
        try:
            await asyncio.wait_for(client.ended.wait(), ASK_SECONDS)
        except TimeoutError:  # counted in turns of this process, which may be blocked itself
            num_silent = num_silent + 1 if client.num_pings == num_pings else 0
            num_pings = client.num_pings
        if num_silent >= MAX_UNANSWERED:
            logger.error("engine %d has sent nothing for %g s", engine_id, num_silent * ASK_SECONDS)
            client.abandon()
            await client.ended.wait()
