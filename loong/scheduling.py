"""The loop that serves real clusters and simulated ones: events in, plans out."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from loong.core.cluster_state import ClusterState
from loong.core.cost_model import CostModel
from loong.core.events import Event
from loong.core.instructions import Instruction, ReleaseKV
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.executor.protocol import Executor
from loong.scheduler.policy import Policy


class Observer(Protocol):
    """Sees all that the loop does, in order; it must neither change anything nor wait."""

    def took_in(self, event: Event, /) -> None:
        """The state has applied `event`."""
        ...

    def planned(
        self,
        events: Sequence[Event],
        snapshot: Snapshot,
        plan: IterationPlan,
        instructions: Sequence[Instruction],
        /,
    ) -> None:
        """On `events`, taken in together, `plan` was made for `snapshot`, which gave `instructions`."""
        ...


class Scheduling:
    """State, policy and executor put together."""

    def __init__(
        self,
        state: ClusterState,
        policy: Policy,
        cost_model: CostModel,
        executor: Executor,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.state, self._policy, self._cost_model, self._executor = state, policy, cost_model, executor
        self._observers = observers

    async def events(self) -> AsyncGenerator[Event, None]:
        """Take in every event, hand it on, and act on those there are, until the executor has drained."""
        while events := await self._executor.next_events():
            calls = []
            for event in events:
                self._executor.submit(self.state.apply(event))
                if self.state.calls_for_a_plan(event):
                    calls.append(event)
                for observer in self._observers:
                    observer.took_in(event)
                yield event
            has_settled = not calls
            while not has_settled:
                has_settled = self._plan(calls, events[-1].time)

    def _plan(self, calls: Sequence[Event], now: float) -> bool:
        """Start what the policy wants; false if that freed KV or ended requests, for no event will tell."""
        snapshot = self.state.snapshot(now)
        plan = self._policy(snapshot, self._cost_model)
        instructions = self.state.commit(plan, snapshot)
        self._executor.submit(instructions)
        for observer in self._observers:
            observer.planned(calls, snapshot, plan, instructions)
        has_freed = any(isinstance(instruction, ReleaseKV) for instruction in instructions)
        return not (has_freed or plan.failures)
