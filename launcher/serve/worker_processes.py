"""The worker processes of a server: started and watched, also those of instances that come and go."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from loong.core.errors import ClusterError
from loong.core.instance import ElasticInstance
from loong.core.placement import InstanceId
from loong.executor.endpoints import WorkerId
from loong.executor.recovery import Backoff, Failures, Restarts, SendSignal
from loong.executor.workers import WorkersExecutor
from loong.launcher.serve.child_processes import ChildProcess, ForkServer, guarded, how_it_ended, stop
from loong.worker.config import WorkerConfig

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 0.3


class WorkerProcesses:
    """One process for each rank of each instance."""

    def __init__(
        self,
        fork_server: ForkServer,
        config_of: Callable[[WorkerId, str], WorkerConfig],
        commands: Mapping[WorkerId, str],
        instances: tuple[ElasticInstance, ...],
        backoff: Backoff,
    ) -> None:
        """`config_of` returns the configuration of a worker that takes commands at an endpoint.

        `commands` are the first endpoints of all workers that there can be, and `instances` their instances.
        """
        self._fork_server, self._config_of = fork_server, config_of
        self._processes: dict[WorkerId, ChildProcess] = {}
        self._commands = dict(commands)
        self._tasks: set[asyncio.Task[None]] = set()
        self._retired: defaultdict[InstanceId, list[ChildProcess]] = defaultdict(list)  # that may still end
        self._coming: dict[InstanceId, asyncio.Task[None]] = {}  # the latest starts
        self._num_starts: Counter[InstanceId] = Counter()
        self._executor: WorkersExecutor | None = None
        self.restarts = Restarts(
            self._start_again, self._end, self._retire, instances, self._signals_of, Failures(backoff)
        )

    def start(self, workers: Iterable[WorkerId], executor: WorkersExecutor) -> None:
        """Start the first workers."""
        self._executor = executor
        for worker_id in workers:
            self._start(self._config_of(worker_id, self._commands[worker_id]), executor)

    @property
    def _all(self) -> tuple[ChildProcess, ...]:
        return (*self._processes.values(), *chain.from_iterable(self._retired.values()))

    def kill(self) -> None:
        """Kill all that have not ended."""
        self._fork_server.kill(self._all)

    def forget(self) -> None:
        """Watch no process any more, and start none again."""
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """Wait until all have ended; each was asked to end."""
        await asyncio.gather(*map(stop, self._all))

    def _start(self, config: WorkerConfig, executor: WorkersExecutor) -> None:
        worker_id = config.instance_id, config.tp_rank
        process = self._fork_server.start(config)
        self._processes[worker_id] = process
        self._run(self._watch(process, worker_id, executor), executor)

    async def _watch(self, process: ChildProcess, worker_id: WorkerId, executor: WorkersExecutor) -> None:
        code = await process.wait()
        await asyncio.sleep(_LAST_WORDS_SECONDS)  # what it reported last says more than its exit code
        if self._processes.get(worker_id) is process:
            executor.lose(worker_id, f"its process {process.pid} {how_it_ended(code)}")

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
        for worker_id in [w for w in self._processes if w[0] == instance_id]:
            process = self._processes.pop(worker_id)
            self._retired[instance_id].append(process)
            self._run(stop(process), self._executor)

    async def _start_later(self, instance_id: InstanceId, executor: WorkersExecutor, delay: float) -> None:
        before = [process for w, process in self._processes.items() if w[0] == instance_id]
        for process in (*before, *self._retired[instance_id]):
            await process.wait()
        self._retired[instance_id].clear()
        if self._fork_server.has_ended:
            raise ClusterError("the fork server of the workers has ended, so no worker can start any more")
        await asyncio.sleep(delay)
        self._num_starts[instance_id] += 1
        first = {w: where for w, where in self._commands.items() if w[0] == instance_id}
        endpoints = {w: f"{where}-{self._num_starts[instance_id]}" for w, where in first.items()}
        executor.members.expect(endpoints)
        for worker_id, where in endpoints.items():
            self._start(replace(self._config_of(worker_id, where), is_late=True), executor)

    def _run(self, work: Coroutine[None, None, None], executor: WorkersExecutor) -> asyncio.Task[None]:
        task = guarded(work, executor.fail)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
