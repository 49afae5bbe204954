"""Runs with a decision log: in virtual time, or scripted."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from plans import prefill
from simulation import timed_request

from loong.core.cost.cost_model import CostModel
from loong.core.events import (
    BatchFinished,
    BatchStarted,
    Event,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import RunBatch
from loong.core.plan import IterationPlan
from loong.core.request import Request, RequestView
from loong.engine.loop import Scheduling
from loong.executor.simulated import SimulatedExecutor
from loong.observability.decision_log.lines import Line
from loong.observability.decision_log.log import DecisionLog, decision_log
from loong.observability.decision_log.reader import read_log
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.policy import Policy
from loong.state.cluster_state import ClusterState


def clock(step: float, token: float, moved_key: float = 0.0) -> WorkCostModel:
    """Return a cost model: seconds of a step, of each token of its busiest instance, and of a moved token."""
    nothing = dict.fromkeys((field.name for field in fields(Coefficients)), 0.0)
    return WorkCostModel(Coefficients(**{**nothing, "step": step, "token": token, "moved_key": moved_key}))


SIMPLE_CLOCK = clock(step=10e-3, token=1e-3, moved_key=0.1e-3)


def host_tier(instance_id: int, kv_capacity: int) -> ElasticInstance:
    """Return a host-memory pool."""
    return ElasticInstance(instance_id, 1, InstanceKind.HOST, kv_capacity)


def logged(
    path: Path,
    policy: Policy,
    instances: Sequence[ElasticInstance],
    requests: Iterable[Request],
    *,
    cost_model: CostModel = SIMPLE_CLOCK,
    aborts: Iterable[RequestAborted] = (),
    keeps_prefixes: bool = False,
) -> tuple[Line, ...]:
    """Return the log of a run until drained, read back from `path`."""

    async def drain() -> None:
        state = ClusterState(tuple(instances), keeps_prefixes=keeps_prefixes)
        executor = SimulatedExecutor(cost_model, requests, aborts)
        with decision_log(path) as log:
            async for _ in Scheduling(state, policy, cost_model, executor, (log,)).events():
                pass

    asyncio.run(drain())
    return read_log(path)


class EventReporter:
    """A loop without policy or executor: a test passes events and plans. Batches start when planned."""

    def __init__(self, log: DecisionLog, instances: Iterable[ElasticInstance]) -> None:
        self.state = ClusterState(tuple(instances))
        self._log = log

    def report(self, event: Event, plan: IterationPlan | None = None) -> None:
        """Let an event happen, and on it a plan (the empty one, unless given)."""
        applied = self.state.apply(event)
        self._log.on_event(event, applied)
        if applied.needs_plan:
            snapshot, made = self.state.snapshot(event.time), plan or IterationPlan()
            instructions = self.state.commit(made, snapshot)
            self._log.on_plan([event], snapshot, made, instructions)
            for instruction in instructions:
                if isinstance(instruction, RunBatch):
                    self.report(BatchStarted(event.time, instruction.batch_id))

    def plan(self, time: float, plan: IterationPlan) -> None:
        """Make a plan on an event that changes nothing: who is not there leaves."""
        self.report(RequestAborted(time, "nobody"), plan)


def reported(
    path: Path, instances: Iterable[ElasticInstance], script: Callable[[EventReporter], None]
) -> tuple[Line, ...]:
    """Return the log of a script, read back from `path`."""
    with decision_log(path) as log:
        script(EventReporter(log, instances))
    return read_log(path)


def prefill_two(reporter: EventReporter) -> tuple[RequestView, RequestView]:
    """Return two requests of 6 prompt and 9 output tokens, with their first tokens at second 1.

    The KV of r000 is on instances 0 and 1, that of r001 on instance 2.
    """
    for number in range(2):
        reporter.report(RequestArrived(0.0, timed_request(number, 6, 9)))
    first, second = reporter.state.snapshot(0.0).waiting
    reporter.plan(0.0, IterationPlan((prefill([first], (0, 1)), prefill([second], (2,)))))
    for batch_id, request_id in ((1, "r000"), (2, "r001")):
        reporter.report(TokensProduced(1.0, batch_id, 0, (ProducedToken(request_id, 5),)))
        reporter.report(BatchFinished(1.0, batch_id, 1))
    first, second = reporter.state.snapshot(1.0).running
    return first, second
