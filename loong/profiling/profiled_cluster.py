"""A cluster to try plans on, one at a time, timed as the engine would see it."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Protocol

from loong.core.applied import Applied
from loong.core.errors import ClusterError
from loong.core.events import (
    BatchFinished,
    Event,
    InstanceLost,
    MigrationFinished,
    RequestAborted,
    RequestArrived,
)
from loong.core.instance import ElasticInstance, ESPGroup
from loong.core.placement import InstanceId, Placement
from loong.core.plan import IterationPlan
from loong.core.request import Request, RequestId, RequestView, SamplingParams
from loong.core.snapshot import Snapshot
from loong.executor.protocol import Executor
from loong.scheduler.cost.idle_tracker import IdleTracker
from loong.state.cluster_state import ClusterState
from loong.workloads.request import SMALLEST_VOCABULARY

MAX_TOKENS = 1_000_000  # of output: no request ends by itself


class TimedExecutor(Executor, Protocol):
    """An executor that also reports the present time of its clock."""

    @property
    def now(self) -> float:
        """Return seconds since the start."""
        ...


class ProfiledCluster:
    """The engine's loop by hand: the caller says what arrives, runs and ends."""

    def __init__(
        self, instances: Sequence[ElasticInstance], executor: TimedExecutor, idle_seconds: float
    ) -> None:
        self._state, self._executor = ClusterState(tuple(instances)), executor
        self._num_arrived = 0
        self.batch_seconds: float | None = None
        self._now = executor.now
        self._idle_tracker = IdleTracker(idle_seconds)

    @property
    def now(self) -> float:
        """Return the seconds since the start, by the executor."""
        return self._executor.now

    @property
    def last_id(self) -> int:
        """Return the id of the last batch or migration."""
        return self._state.last_id

    def snapshot(self) -> Snapshot:
        """Return the cluster at the time of the last event."""
        return self._state.snapshot(self._now)

    def views(self, request_ids: Sequence[RequestId]) -> list[RequestView]:
        """Return requests as a policy sees them."""
        known = self.snapshot().request
        return [known[request_id] for request_id in request_ids]

    def placements(self) -> Mapping[RequestId, Placement]:
        """Return the placement of every request's KV."""
        return {request_id: view.placement for request_id, view in self.snapshot().request.items()}

    def free(self) -> dict[InstanceId, int]:
        """Return the tokens that each instance has room for."""
        return {instance.instance_id: instance.kv_free for instance in self.snapshot().instances}

    def starts_idle(self, group: ESPGroup) -> bool:
        """Return whether an instance of the group has been idle for a while."""
        return self._idle_tracker.were_idle(group.instance_ids, self._executor.now)

    def arrive(self, num_prompt_tokens: int, random: Random) -> RequestId:
        """Add a request with a prompt of this length; it goes on until `end_all`."""
        self._num_arrived += 1
        prompt = tuple(random.choices(range(SMALLEST_VOCABULARY), k=num_prompt_tokens))
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
        self._now = self._executor.now
        request = Request(f"profile-{self._num_arrived}", prompt, params, arrival_time=self._now)
        self._state.apply(RequestArrived(self._now, request))
        return request.request_id

    async def carry_out(self, plan: IterationPlan) -> float:
        """Run a plan to its end; returns the seconds from its commit until all of it is done.

        `batch_seconds` is then what the workers measured of a batch in it, if they did.
        Raises `ClusterError` if an instance is lost, or a migration is rolled back.
        """
        self.batch_seconds = None
        started_at, num_running = self.submit(plan), len(plan.batches) + len(plan.migrations)
        while num_running:
            for event, _ in await self.next_events():
                match event:
                    case BatchFinished():
                        num_running -= 1
                        self.batch_seconds = event.seconds
                    case MigrationFinished():
                        num_running -= 1
                    case _:
                        pass
        for batch in plan.batches:
            self._idle_tracker.work(batch.group.instance_ids, self._now)
        return self._now - started_at

    def submit(self, plan: IterationPlan) -> float:
        """Commit a plan, and return the time of that."""
        snapshot = self.snapshot()
        started_at = self._executor.now
        self._executor.submit(self._state.commit(plan, snapshot))
        return started_at

    async def next_events(self) -> Sequence[tuple[Event, Applied]]:
        """Return the next events of plans under way and their consequences, once they are applied.

        Raises `ClusterError` if an instance is lost, or a migration is rolled back.
        """
        taken = list[tuple[Event, Applied]]()
        if not (events := await self._executor.next_events()):
            raise ClusterError("a plan was in flight when the cluster was drained")
        for event in events:
            match event:
                case InstanceLost():
                    raise ClusterError(f"instance {event.instance_id} was lost: {event.reason}")
                case MigrationFinished(is_committed=False):
                    raise ClusterError(f"migration {event.migration_id} was rolled back")
                case _:
                    pass
            self._now = event.time
            applied = self._state.apply(event)
            self._executor.submit(applied.instructions)
            taken.append((event, applied))
        return taken

    def end(self, request_id: RequestId) -> None:
        """Abort a request, so that its KV is free."""
        self._executor.submit(self._state.apply(RequestAborted(self._now, request_id)).instructions)

    def end_all(self) -> None:
        """Abort every request, so that all KV is free."""
        for request_id in tuple(self.snapshot().request):
            self.end(request_id)
