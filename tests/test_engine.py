"""The engine as its server sees it, over workers that do nothing."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest
from raw_http import until

from loong.core.cluster_state import ClusterState
from loong.core.cost_model import CostModel
from loong.core.errors import ClusterError
from loong.core.events import Drained, Event, InstanceLost, ProducedToken
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import Instruction
from loong.core.plan import IterationPlan
from loong.core.request import Request, SamplingParams
from loong.core.snapshot import Snapshot
from loong.core.timeline import Timeline
from loong.engine import HEALTHY_SILENCE_SECONDS, HEALTHY_STEP_SECONDS, Engine
from loong.executor.workers import WorkersExecutor
from loong.scheduler.cost_model import WorkCostModel
from loong.scheduling import Scheduling
from loong.server.engine_client import EngineLimits
from loong.server.token_stream import TokenStream
from loong.stream import Stream

INSTANCES = (ElasticInstance(0, 1, InstanceKind.FULL, 100),)
REQUEST = Request("a", (1, 2, 3), SamplingParams(max_tokens=5), arrival_time=0.0)


@dataclass
class IdleWorkers:
    """Workers that are heard from, but take no step; the test moves their clock."""

    now: float = 0.0
    seconds_since_heard: float = 0.0
    events: Stream[Event | Drained] = field(default_factory=Stream)

    async def next_events(self) -> Sequence[Event]:
        return [event for event in await self.events.get_all() if not isinstance(event, Drained)]

    def post(self, event: Event | Drained) -> None:
        self.events.put(event)

    def submit(self, instructions: Iterable[Instruction]) -> None:
        pass


def no_plan(_snapshot: Snapshot, _cost_model: CostModel, /) -> IterationPlan:
    return IterationPlan()


@asynccontextmanager
async def running_engine(workers: IdleWorkers) -> AsyncIterator[Engine]:
    executor = cast("WorkersExecutor", workers)
    scheduling = Scheduling(ClusterState(INSTANCES), no_plan, WorkCostModel(), executor)
    engine = Engine(scheduling, executor, EngineLimits(100, 100, 10), Timeline())
    running = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        workers.post(Drained())
        await asyncio.gather(running, return_exceptions=True)


async def first_token(engine: Engine) -> ProducedToken:
    with TokenStream(engine, REQUEST) as tokens:
        return await anext(tokens)


async def until_waiting(engine: Engine, number: int) -> None:
    await until(lambda: len(engine.snapshot().waiting) == number)


async def test_an_engine_with_nothing_to_do_is_healthy_for_ever() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        workers.now = 1e6
        assert engine.health().is_alive


async def test_requests_that_do_not_advance_make_an_engine_unhealthy() -> None:
    workers = IdleWorkers(now=1e6)
    async with running_engine(workers) as engine:
        asking = asyncio.create_task(first_token(engine))
        await until_waiting(engine, 1)
        workers.now += HEALTHY_STEP_SECONDS
        assert engine.health().is_alive
        workers.now += 1
        health = engine.health()
        assert not health.is_alive
        assert all(word in health.message for word in ("121 s", "1 request"))
        asking.cancel()
        await until_waiting(engine, 0)
        assert engine.health().is_alive


async def test_a_worker_that_is_not_heard_from_makes_an_engine_unhealthy() -> None:
    workers = IdleWorkers(seconds_since_heard=HEALTHY_SILENCE_SECONDS + 1)
    async with running_engine(workers) as engine:
        assert "silent for 5.0 s" in engine.health().message


async def test_nothing_is_told_to_run_or_wait_once_an_engine_has_failed() -> None:
    workers = IdleWorkers()
    async with running_engine(workers) as engine:
        asking = asyncio.create_task(first_token(engine))
        await until_waiting(engine, 1)
        workers.post(InstanceLost(0.0, 0, "it fell over"))
        with pytest.raises(ClusterError, match="it fell over"):
            await asking
        snapshot = engine.snapshot()
        assert not snapshot.request
        assert snapshot.kv_used == 0
        assert snapshot.stats.num_arrived == 1
        assert "it fell over" in engine.health().message
