"""The workers of lent room: this engine starts those of others in memory of its own workers."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from loong.core.errors import ConfigError
from loong.core.kv_layout import LentSlots
from loong.core.placement import InstanceId
from loong.executor.room_workers import RoomRequest
from loong.launcher.cluster.starter import WorkerStarter
from loong.launcher.cluster.worker_settings import WorkerSettings
from loong.processes.child import config_line, config_of
from loong.processes.child_processes import ChildProcess
from loong.worker.config import WorkerConfig

logger = logging.getLogger(__name__)


class StartedRoomWorkers:
    """Implements `RoomWorkers`. A loan has a process for each rank, which maps memory of a worker here."""

    def __init__(self, starter: WorkerStarter, settings: WorkerSettings) -> None:
        self._starter, self._settings = starter, settings
        self.remote_reports = ""  # where workers of other hosts send reports, once the executor is there
        self._num_starts: Counter[InstanceId] = Counter()
        self._processes: dict[str, list[ChildProcess]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def request(self, instance_id: InstanceId) -> RoomRequest:
        """See RoomWorkers."""
        self._num_starts[instance_id] += 1
        settings, number = self._settings, self._num_starts[instance_id]
        commands = {w: settings.commands_endpoint(w, number) for w in settings.workers_of(instance_id)}
        configs = [
            settings.worker(w, where, self.remote_reports, is_restarted=True) for w, where in commands.items()
        ]
        lines = tuple(config_line(config).decode() for config in configs)
        return RoomRequest(commands, lines, settings.host_id_of(instance_id))

    def start(
        self,
        loan_id: str,
        lender_id: InstanceId,
        configs: Sequence[str],
        slots: Sequence[LentSlots],
        on_end: Callable[[], None],
    ) -> None:
        """See RoomWorkers."""
        try:
            found = [config_of(config.encode(), WorkerConfig) for config in configs]
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(f"loan {loan_id} has no configuration of a worker: {error}") from error
        self._processes[loan_id] = processes = [
            self._starter.start_lent(
                replace(config, kv_capacity=_num_tokens(lent), lent=lent, lends=False), lender_id, loan_id
            )
            for config, lent in zip(found, slots, strict=True)
        ]
        task = asyncio.create_task(self._watch(loan_id, processes, on_end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def end(self, loan_id: str) -> None:
        """See RoomWorkers."""
        self._starter.kill(self._processes.get(loan_id, ()))

    async def stop(self) -> None:
        """End all, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        processes = [process for each in self._processes.values() for process in each]
        self._starter.kill(processes)
        await asyncio.gather(*(process.wait() for process in processes))

    async def _watch(
        self, loan_id: str, processes: Sequence[ChildProcess], on_end: Callable[[], None]
    ) -> None:
        ends = [asyncio.ensure_future(process.wait()) for process in processes]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self._starter.kill(processes)
        await asyncio.gather(*ends)
        del self._processes[loan_id]
        on_end()


def _num_tokens(lent: LentSlots) -> int:
    return sum(stop - start for start, stop in lent.runs)
