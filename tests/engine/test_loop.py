"""The loop that applies events, plans and sends instructions."""

import asyncio
from collections.abc import Sequence

from simulation import instances_with, timed_request

from loong.core.applied import Applied
from loong.core.cost.cost_model import CostModel
from loong.core.events import BatchFinished, Event, TokensProduced
from loong.core.instructions import Instruction
from loong.core.plan import Failure, IterationPlan, Preemption
from loong.core.snapshot import EXTENSION_STEPS, Snapshot
from loong.engine.loop import Scheduling
from loong.executor.simulated import SimulatedExecutor
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import Policy, make_policy
from loong.state.cluster_state import ClusterState


class Seen:
    """An observer that keeps, in order, what was taken in, and with each plan on what it was made."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.plans: list[tuple[Sequence[Event], Snapshot]] = []

    def on_event(self, event: Event, _applied: Applied, /) -> None:
        self.events.append(event)

    def on_plan(
        self,
        events: Sequence[Event],
        snapshot: Snapshot,
        _plan: IterationPlan,
        _reported: Sequence[Instruction],
        /,
    ) -> None:
        assert set(map(id, events)) <= set(map(id, self.events))
        self.plans.append((events, snapshot))


def seen(policy: Policy, executor: SimulatedExecutor) -> Seen:
    """Return an observer's record of a run until it is drained."""
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


def test_what_a_plan_frees_or_ends_is_planned_for_at_once() -> None:
    static = make_policy("static-sp", PolicyConfig())
    reported: list[IterationPlan] = []

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        plan = static(snapshot, cost_model)
        if not reported:
            plan = IterationPlan(failures=(Failure("r000", "it is not wanted"),))
        elif len(reported) == 2:
            plan = IterationPlan(preemptions=(Preemption("r001"),))
        reported.append(plan)
        return plan

    requests = [timed_request(number, 20, 3) for number in range(2)]
    run = seen(policy, SimulatedExecutor(WorkCostModel(), requests))
    ended, begun, preempted, again = run.plans[:4]
    for (events, before), (same_events, after) in ((ended, begun), (preempted, again)):
        assert (after.now, same_events) == (before.now, events)
    assert [view.request_id for view in begun[1].waiting] == ["r001"]
    assert (preempted[1].kv_used, again[1].kv_used) == (20, 0)
    assert not run.plans[-1][1].request


def test_tokens_call_for_a_plan_where_a_request_ends_and_where_a_lease_comes_near_its_end() -> None:
    requests = [timed_request(number, 20, 40 + number) for number in range(3)]
    config = PolicyConfig(lease_steps=20)
    run = seen(make_policy("static-sp", config), SimulatedExecutor(WorkCostModel(), requests))
    called = [event for events, _ in run.plans for event in events if isinstance(event, TokensProduced)]
    steps = [event.step + 1 for event in called if not any(token.finish_reason for token in event.tokens)]
    assert steps == [num_steps - EXTENSION_STEPS for num_steps in (20, 40, 41)]  # as it was extended
    assert len(called) == len(steps) + len(requests)


def test_a_lease_that_may_go_on_is_one_batch_to_its_end() -> None:
    requests = [timed_request(0, 20, 100)]
    run = seen(make_policy("static-sp", PolicyConfig()), SimulatedExecutor(WorkCostModel(), requests))
    finished = [event for event in run.events if isinstance(event, BatchFinished)]
    assert [event.num_steps for event in finished] == [1, 99]
