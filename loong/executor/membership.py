"""The workers of a cluster: their endpoints, and which of them are ready, heard from, or started again."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from loong.core.errors import ClusterError
from loong.core.placement import InstanceId
from loong.executor.endpoints import Endpoints, WorkerId
from loong.executor.heartbeats import Heartbeats
from loong.executor.worker_calls import WorkerCalls
from loong.executor.worker_sockets import WorkerSockets
from loong.stray_frames import StrayFrames
from loong.wire import WorkerReady


class Membership:
    """The workers that take commands, at `endpoints`; they send a heartbeat every `heartbeat` seconds."""

    def __init__(self, endpoints: Endpoints, heartbeat: float, strays: StrayFrames) -> None:
        """`strays` counts what comes from no worker."""
        self.endpoints = endpoints
        self.sockets = WorkerSockets(endpoints, strays)
        self.calls = WorkerCalls(endpoints.commands, self.sockets.send)
        self.heartbeats = Heartbeats(endpoints.commands, heartbeat)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._not_ready = set(endpoints.commands)
        self._restarting: dict[InstanceId, set[WorkerId]] = {}  # workers that are not ready again

    async def wait_until_ready(self, timeout: float) -> None:
        """Wait for every worker's weights and pools.

        Raises `ClusterError` if one is lost before, or not ready within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                await self.ready
        except TimeoutError:
            late = sorted({instance_id for instance_id, _ in self._not_ready})
            raise ClusterError(f"instances {late} were not ready within {timeout:g} s") from None

    def fail_to_start(self, instance_id: InstanceId, reason: str) -> None:
        """Let `wait_until_ready` raise, if it has not returned."""
        if not self.ready.done():
            self.ready.set_exception(ClusterError(f"instance {instance_id} did not start: {reason}"))

    def is_restarting(self, instance_id: InstanceId) -> bool:
        """Return whether an instance is started again and not ready."""
        return instance_id in self._restarting

    def expect(self, commands: Mapping[WorkerId, str]) -> None:
        """Take the workers of an instance that is started again, by the endpoints of their commands."""
        self.sockets.add(commands)
        for worker_id in commands:
            self._restarting.setdefault(worker_id[0], set()).add(worker_id)
        self.endpoints = replace(self.endpoints, commands={**self.endpoints.commands, **commands})

    def drop(self, instance_id: InstanceId) -> tuple[WorkerId, ...]:
        """Send nothing more to the workers of a lost instance, and expect nothing of them. Return them."""
        workers = self.endpoints.workers_of(instance_id)
        self._restarting.pop(instance_id, None)
        self.heartbeats.drop(workers)
        self.calls.drop(workers)
        self.sockets.drop(workers)
        kept = {w: where for w, where in self.endpoints.commands.items() if w not in workers}
        self.endpoints = replace(self.endpoints, commands=kept)
        return workers

    def take_ready(self, report: WorkerReady) -> bool:
        """Record that a worker is ready. Return whether its instance is, after it was started again."""
        worker_id = report.instance_id, report.tp_rank
        self.sockets.connect(worker_id, report.commands_endpoint)
        self._not_ready.discard(worker_id)
        if not self._not_ready and not self.ready.done():
            self.ready.set_result(None)
        instance_id, _ = worker_id
        waiting = self._restarting.get(instance_id)
        if waiting is None:
            return False
        waiting.discard(worker_id)
        if waiting:
            return False
        del self._restarting[instance_id]
        workers = self.endpoints.workers_of(instance_id)
        self.heartbeats.add(workers)
        self.calls.add(workers)
        return True
