"""Real worker processes for tests, under any policy."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from loong.core.cluster_state import ClusterState
from loong.core.cost_model import CostModel
from loong.core.events import Drained, ProducedToken
from loong.core.plan import IterationPlan
from loong.core.request import Request
from loong.core.snapshot import Snapshot
from loong.engine import Engine, Scheduling
from loong.executor.workers import WorkersExecutor
from loong.launcher.local import ClusterConfig, local_workers
from loong.scheduler.cost_model import LinearCostModel
from loong.scheduler.policy import Policy
from loong.server.engine_client import EngineLimits


def plan_nothing(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
    """Wait."""
    return IterationPlan()


@dataclass
class Cluster:
    """A running engine whose policy each test chooses."""

    executor: WorkersExecutor
    state: ClusterState
    engine: Engine = field(init=False)
    policy: Policy = plan_nothing
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def __post_init__(self) -> None:
        scheduling = Scheduling(self.state, self._plan, LinearCostModel(), self.executor)
        capacity = sum(instance.kv_capacity for instance in self.state.snapshot(0).instances)
        self.engine = Engine(scheduling, self.executor, EngineLimits(capacity, capacity, 1 << 30))

    def run(
        self, requests: Sequence[Request], policy: Policy, timeout: float = 120
    ) -> dict[str, list[ProducedToken]]:
        """All tokens of all requests, which arrive together; checks that every slot is free at the end."""
        self.policy = policy
        work = asyncio.run_coroutine_threadsafe(self._run(requests, timeout), self.loop)
        return work.result(timeout + 5)

    async def _run(self, requests: Sequence[Request], timeout: float) -> dict[str, list[ProducedToken]]:
        async with asyncio.timeout(timeout):
            outputs = await asyncio.gather(*(self._collect(request) for request in requests))
            await self.drained()
        return {request.request_id: tokens for request, tokens in zip(requests, outputs, strict=True)}

    async def _collect(self, request: Request) -> list[ProducedToken]:
        return [token async for token in self.engine.generate(request)]

    async def drained(self) -> None:
        """Wait until no request is live; every slot must then be free."""
        while (snapshot := self.engine.snapshot()).request:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.002)
        self.state.check()
        assert all(instance.kv_used == 0 for instance in snapshot.instances), snapshot.instances

    def _plan(self, snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        self.state.check()
        return self.policy(snapshot, cost_model)


@contextmanager
def running_cluster(config: ClusterConfig) -> Iterator[Cluster]:
    """A cluster in a thread of its own, so that one serves many tests."""
    started: Future[Cluster] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(config, started)))
    thread.start()
    try:
        cluster = started.result()
        yield cluster
        cluster.loop.call_soon_threadsafe(cluster.executor.post, Drained())
    finally:
        thread.join()


async def _serve(config: ClusterConfig, started: Future[Cluster]) -> None:
    try:
        async with local_workers(config) as executor:
            cluster = Cluster(executor, ClusterState(config.instances))
            started.set_result(cluster)
            await cluster.engine.run()
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)
