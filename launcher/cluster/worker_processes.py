"""The worker processes of a server: started and watched, also those of instances that come and go."""

import asyncio
import logging
import signal
from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from itertools import chain

from loong.core.instance import ElasticInstance
from loong.core.placement import InstanceId
from loong.executor.endpoints import WorkerId
from loong.executor.recovery import Backoff, Failures, Restarts, SendSignal
from loong.executor.workers import WorkersExecutor
from loong.launcher.cluster.room_workers import StartedRoomWorkers
from loong.launcher.cluster.starter import WorkerStarter
from loong.launcher.cluster.worker_settings import WorkerSettings
from loong.processes.child_processes import ChildProcess, guarded, how_it_ended, stop

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 0.3
_STACKS_SECONDS = 1.0  # for a worker to log the stacks of its threads


class WorkerProcesses:
    """One process for each rank of each instance."""

    def __init__(
        self,
        starter: WorkerStarter,
        settings: WorkerSettings,
        instances: tuple[ElasticInstance, ...],
        backoff: Backoff,
    ) -> None:
        """`instances` are all, empty."""
        self._starter, self._settings = starter, settings
        self._processes: dict[WorkerId, ChildProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._retired: defaultdict[InstanceId, list[ChildProcess]] = defaultdict(list)  # that may still end
        self._coming: dict[InstanceId, asyncio.Task[None]] = {}  # the latest starts
        self._num_starts: Counter[InstanceId] = Counter()
        self._executor: WorkersExecutor | None = None
        self._room = StartedRoomWorkers(starter, settings)
        self.restarts = Restarts(
            self._start_again,
            self._end,
            self._retire,
            instances,
            self._signals_of,
            Failures(backoff),
            lambda: starter.trouble,
            self._room,
        )

    def start(self, executor: WorkersExecutor) -> None:
        """Start all workers of an executor."""
        self._executor = executor
        self._room.remote_reports = executor.members.sockets.remote_reports
        self._start_all(executor.members.endpoints.commands, executor)

    @property
    def _all(self) -> tuple[ChildProcess, ...]:
        return (*self._processes.values(), *chain.from_iterable(self._retired.values()))

    def kill(self) -> None:
        """Kill all that have not ended."""
        self._starter.kill(self._all)

    def forget(self) -> None:
        """Watch no process any more, and start none again."""
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Wait until all have ended; each was asked to end."""
        await asyncio.gather(self._room.stop(), *map(stop, self._all))

    def _start_all(
        self, commands: Mapping[WorkerId, str], executor: WorkersExecutor, *, is_restarted: bool = False
    ) -> None:
        """Start workers, by the endpoints of their commands."""
        remote_reports = executor.members.sockets.remote_reports
        for worker_id, where in commands.items():
            config = self._settings.worker(worker_id, where, remote_reports, is_restarted=is_restarted)
            process = self._processes[worker_id] = self._starter.start(config)
            self._run(self._watch(process, worker_id, executor), executor)
            self._run(self._limit_start(process, worker_id, executor), executor)

    async def _watch(self, process: ChildProcess, worker_id: WorkerId, executor: WorkersExecutor) -> None:
        code = await process.wait()
        self._settings.forget(worker_id)
        await asyncio.sleep(_LAST_WORDS_SECONDS)  # what it reported last says more than its exit code
        if self._processes.get(worker_id) is process:
            number = "" if process.pid is None else f" {process.pid}"
            executor.lose(worker_id, f"its process{number} {how_it_ended(code)}")

    async def _limit_start(
        self, process: ChildProcess, worker_id: WorkerId, executor: WorkersExecutor
    ) -> None:
        """Count a worker that is not ready in time as lost, once it has logged where it hangs."""
        timeout = self._settings.start_timeout
        await asyncio.sleep(timeout)

        def is_late() -> bool:
            is_present = self._processes.get(worker_id) is process
            return is_present and worker_id in executor.members.not_ready

        if is_late():
            process.send_signal(signal.SIGUSR1)
            await asyncio.sleep(_STACKS_SECONDS)
        if is_late():
            others = sorted({instance_id for instance_id, _ in executor.members.not_ready} - {worker_id[0]})
            nor = f", nor were instances {others}" if others else ""
            executor.lose(worker_id, f"it was not ready within {timeout:g} s{nor}")

    def _end(self, instance_id: InstanceId) -> None:
        """End all processes of an instance: one that is stopped or hangs must not wake up later."""
        for worker_id, process in self._processes.items():
            if worker_id[0] == instance_id:
                process.kill()

    def _signals_of(self, instance_id: InstanceId) -> Sequence[SendSignal]:
        return [process.send_signal for w, process in self._processes.items() if w[0] == instance_id]

    def _start_again(self, instance_id: InstanceId, delay: float) -> None:
        """Start an instance after a delay in seconds, once processes that it had have ended."""
        assert self._executor is not None, "others were started before"
        coming = self._start_later(instance_id, self._executor, delay)
        self._coming[instance_id] = self._run(coming, self._executor)

    def _retire(self, instance_id: InstanceId) -> None:
        """Watch an instance no more. Wait until its processes end, which were asked to, or kill them."""
        assert self._executor is not None, "it was started before"
        if (coming := self._coming.pop(instance_id, None)) is not None:
            coming.cancel()
        self.restarts.failures.forget(instance_id)
        for worker_id in self._settings.workers_of(instance_id):  # those of loans are watched elsewhere
            self._settings.forget(worker_id)
        for worker_id in [w for w in self._processes if w[0] == instance_id]:
            process = self._processes.pop(worker_id)
            self._retired[instance_id].append(process)
            self._run(stop(process), self._executor)

    async def _start_later(self, instance_id: InstanceId, executor: WorkersExecutor, delay: float) -> None:
        before = [process for w, process in self._processes.items() if w[0] == instance_id]
        for process in (*before, *self._retired[instance_id]):
            await process.wait()
        self._retired[instance_id].clear()
        await asyncio.sleep(delay)
        await self._starter.wait_for_host(instance_id)
        self._num_starts[instance_id] += 1
        num_starts, workers = self._num_starts[instance_id], self._settings.workers_of(instance_id)
        endpoints = {w: self._settings.commands_endpoint(w, num_starts) for w in workers}
        executor.members.expect(endpoints)
        self._start_all(endpoints, executor, is_restarted=True)

    def _run(self, work: Coroutine[None, None, None], executor: WorkersExecutor) -> asyncio.Task[None]:
        task = guarded(work, executor.fail)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
