"""The loop that takes events in, plans and tells."""

import asyncio
from collections.abc import Sequence

from simulation import instances_with, timed_request

from loong.core.cluster_state import ClusterState
from loong.core.events import (
    BatchFinished,
    Event,
    RequestArrived,
    TokensProduced,
)
from loong.core.instructions import Instruction
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.executor.simulated import SimulatedExecutor
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost_model import WorkCostModel
from loong.scheduler.policy import Policy, make_policy
from loong.scheduling import Scheduling


class Seen:
    """An observer that keeps, in order, what was taken in, and with each plan on what it was made."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.plans: list[tuple[Sequence[Event], Snapshot]] = []

    def took_in(self, event: Event, /) -> None:
        self.events.append(event)

    def planned(
        self,
        events: Sequence[Event],
        snapshot: Snapshot,
        _plan: IterationPlan,
        _told: Sequence[Instruction],
        /,
    ) -> None:
        assert set(map(id, events)) <= set(map(id, self.events))
        self.plans.append((events, snapshot))


def seen(policy: Policy, executor: SimulatedExecutor) -> Seen:
    """What an observer sees of a run until drained."""
    observer = Seen()
    state = ClusterState(instances_with([600, 600]))

    async def drain() -> list[Event]:
        scheduling = Scheduling(state, policy, WorkCostModel(), executor, (observer,))
        return [event async for event in scheduling.events()]

    assert asyncio.run(drain()) == observer.events
    return observer


def test_all_that_comes_together_is_planned_for_once() -> None:
    requests = [timed_request(number, 20, 3) for number in range(50)]
    run = seen(make_policy("esp", PolicyConfig()), SimulatedExecutor(WorkCostModel(), requests))
    events, snapshot = run.plans[0]
    assert len(events) == len(snapshot.waiting) == 50
    times = [snapshot.now for _, snapshot in run.plans]
    assert times == sorted(set(times))  # so each moment has one plan


def test_a_plan_is_told_of_the_events_that_called_for_it() -> None:
    requests = [timed_request(number, 20, 3 + number) for number in range(3)]
    run = seen(make_policy("replicas", PolicyConfig()), SimulatedExecutor(WorkCostModel(), requests))
    assert len(run.events) > sum(len(events) for events, _ in run.plans)
    for events, _ in run.plans:
        for event in events:
            assert isinstance(event, RequestArrived | BatchFinished | TokensProduced)
            if isinstance(event, TokensProduced):
                assert any(token.finish_reason for token in event.tokens)
