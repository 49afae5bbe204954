"""The workers of a cluster: their endpoints, and which of them are ready, heard from, or started again."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial

from loong.core.errors import ClusterError
from loong.core.events import Event, InstanceDraining, InstanceJoined, InstanceLeft, InstanceLost
from loong.core.instance import ElasticInstance, InstanceKind, Service
from loong.core.placement import InstanceId
from loong.executor.endpoints import Endpoints, WorkerId
from loong.executor.heartbeats import Heartbeats
from loong.executor.recovery import Restarts
from loong.executor.worker_calls import WorkerCalls
from loong.executor.worker_sockets import LINGER_MS, WorkerSockets
from loong.messages.stray_frames import StrayFrames
from loong.messages.wire import Shutdown, WorkerReady

logger = logging.getLogger(__name__)


class Membership:
    """The workers that take commands, at `endpoints`; they send a heartbeat every `heartbeat` seconds.

    With `restarts`, instances come and go. Each such event, a function of the present time, goes to `report`.
    `wanted` are the instances that are to be there. By the events so far, those in `joined` are there, and
    those in `lost` are to return. The state knows no others. Those in `quarantined` failed too often. The
    instances whose workers are ready have `services`. Those in `borrowed` are room of other engines, with the
    reason of the loan. Their workers are started elsewhere, and never again.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        heartbeat: float,
        strays: StrayFrames,
        report: Callable[[Callable[[float], Event]], None],
        restarts: Restarts | None = None,
    ) -> None:
        """`strays` counts what comes from no worker."""
        self.endpoints, self._report, self._restarts = endpoints, report, restarts
        self.sockets = WorkerSockets(endpoints, strays)
        self.calls = WorkerCalls(endpoints.commands, self.sockets.send)
        self.heartbeats = Heartbeats(endpoints.commands, heartbeat)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._not_ready = set(endpoints.commands)
        self._starting: dict[InstanceId, set[WorkerId]] = {}  # workers, of later starts, that are not ready
        self.wanted = {instance_id for instance_id, _ in endpoints.commands}
        self.joined, self.lost = self.wanted.copy(), set[InstanceId]()
        self.quarantined: set[InstanceId] = set()
        self.services: dict[InstanceId, Service] = {}
        self.borrowed: dict[InstanceId, tuple[ElasticInstance, str]] = {}

    @property
    def not_ready(self) -> frozenset[WorkerId]:
        """Return the workers that were started and are not ready."""
        return frozenset(self._not_ready).union(*self._starting.values())

    def fails_to_start(self, instance_id: InstanceId, reason: str) -> bool:
        """Let `ready` raise `ClusterError`, unless all workers were ready before. Return if it raises."""
        if not self.ready.done():
            self.ready.set_exception(ClusterError(f"instance {instance_id} did not start: {reason}"))
        return self.ready.cancelled() or self.ready.exception() is not None

    def serving(self, instances: Iterable[ElasticInstance]) -> tuple[ElasticInstance, ...]:
        """Return these instances with what they serve by the word of their workers, which are ready."""
        return tuple(
            replace(instance, serves=self.services[instance.instance_id])
            if instance.kind is not InstanceKind.HOST
            else instance
            for instance in instances
        )

    def is_starting(self, instance_id: InstanceId) -> bool:
        """Return whether an instance was started after the others, or again, and is not ready."""
        return instance_id in self._starting

    def expect(self, commands: Mapping[WorkerId, str]) -> None:
        """Take the workers of an instance that was started, by the endpoints of their commands."""
        self.sockets.add(commands)
        for worker_id in commands:
            self._starting.setdefault(worker_id[0], set()).add(worker_id)
        self.endpoints = replace(self.endpoints, commands={**self.endpoints.commands, **commands})

    def borrow(self, instance: ElasticInstance, reason: str, commands: Mapping[WorkerId, str]) -> None:
        """Take the workers of room that another engine lends. The instance joins once they are ready."""
        self.borrowed[instance.instance_id] = instance, reason
        self.expect(commands)

    def drop(self, instance_id: InstanceId, linger_ms: int = 0) -> tuple[WorkerId, ...]:
        """Send nothing more to the workers of an instance, and expect nothing of them. Return them.

        What is queued for them has `linger_ms` to leave.
        """
        workers = self.endpoints.workers_of(instance_id)
        self._starting.pop(instance_id, None)
        self.heartbeats.drop(workers)
        self.calls.drop(workers)
        self.sockets.drop(workers, linger_ms)
        kept = {w: where for w, where in self.endpoints.commands.items() if w not in workers}
        self.endpoints = replace(self.endpoints, commands=kept)
        return workers

    def take_ready(self, report: WorkerReady) -> bool:
        """Record that a worker is ready. Return whether its instance is, if it was started later."""
        worker_id = report.instance_id, report.tp_rank
        self.services[report.instance_id] = report.serves
        self.sockets.connect(worker_id, report.commands_endpoint)
        self._not_ready.discard(worker_id)
        if not self._not_ready and not self.ready.done():
            self.ready.set_result(None)
        instance_id, _ = worker_id
        waiting = self._starting.get(instance_id)
        if waiting is None:
            return False
        waiting.discard(worker_id)
        if waiting:
            return False
        del self._starting[instance_id]
        workers = self.endpoints.workers_of(instance_id)
        self.heartbeats.add(workers)
        self.calls.add(workers)
        return True

    def add(self, instance_id: InstanceId) -> None:
        """Start an instance that is not there. It joins once it is ready."""
        self.wanted.add(instance_id)
        self._coming_and_going.start(instance_id, 0.0)

    def join(self, instance_id: InstanceId) -> None:
        """Report that an instance has joined, for the first time or again."""
        logger.info("instance %d is there%s", instance_id, " again" if instance_id in self.lost else "")
        self._coming_and_going.failures.join(instance_id)
        self.joined.add(instance_id)
        self.lost.discard(instance_id)
        reason = self.borrowed[instance_id][1] if instance_id in self.borrowed else ""
        for instance in self.serving(self._pools_of(instance_id)):
            self._report(partial(InstanceJoined, instance=instance, reason=reason))

    def lose(self, instance_id: InstanceId, reason: str) -> None:
        """Report that an instance is lost, and start it again if it is wanted."""
        for instance in self._pools_of(instance_id):
            self._report(partial(InstanceLost, instance_id=instance.instance_id, reason=reason, returns=True))
        self.joined.discard(instance_id)
        self.lost.add(instance_id)
        self.start_again(instance_id)

    def start_again(self, instance_id: InstanceId) -> None:
        """Start an instance that failed, if it is wanted. One that has failed too often leaves instead.

        So does one where none can start any more.
        """
        restarts = self._coming_and_going
        if instance_id not in self.wanted:
            self._leave(instance_id)
        elif (
            not (trouble := restarts.trouble()) and (delay := restarts.failures.fail(instance_id)) is not None
        ):
            restarts.start(instance_id, delay)
        else:
            why = trouble or "it has failed again and again"
            logger.error("instance %d is quarantined: %s", instance_id, why)
            self.wanted.discard(instance_id)
            self.quarantined.add(instance_id)
            self._leave(instance_id)

    def release(self, instance_ids: Iterable[InstanceId]) -> None:
        """Let quarantined instances be added again."""
        self.quarantined.difference_update(instance_ids)

    def drain(self, instance_id: InstanceId, reason: str = "") -> None:
        """Begin to remove an instance. One that is not there now leaves at once."""
        self.wanted.discard(instance_id)
        if instance_id not in self.joined:
            self._coming_and_going.end(instance_id)
            self._leave(instance_id)
            return
        for instance in self._pools_of(instance_id):
            self._report(partial(InstanceDraining, instance_id=instance.instance_id, reason=reason))

    def end_drained(self, drained_ids: Set[InstanceId]) -> None:
        """End instances that have drained; one that is lost leaves because of that."""
        for instance_id in sorted(self.joined - self.wanted):
            workers = self.endpoints.workers_of(instance_id)
            if workers and all(i.instance_id in drained_ids for i in self._pools_of(instance_id)):
                self.sockets.send(workers, Shutdown())
                self._leave(instance_id)

    def _leave(self, instance_id: InstanceId) -> None:
        """Take an instance out, and report that it left if the state knows it."""
        self.drop(instance_id, LINGER_MS)
        self._coming_and_going.retire(instance_id)
        logger.info("instance %d has left", instance_id)
        if instance_id in self.joined | self.lost:
            for instance in self._pools_of(instance_id):
                self._report(partial(InstanceLeft, instance_id=instance.instance_id))
        self.joined.discard(instance_id)
        self.lost.discard(instance_id)
        self.borrowed.pop(instance_id, None)

    @property
    def _coming_and_going(self) -> Restarts:
        assert self._restarts is not None, "instances come and go only where they can be started"
        return self._restarts

    def _pools_of(self, instance_id: InstanceId) -> Iterator[ElasticInstance]:
        """Yield an instance, and the host tier that its processes keep, if there is one."""
        if instance_id in self.borrowed:
            yield self.borrowed[instance_id][0]
        else:
            yield from self._coming_and_going.kept_by(instance_id)
