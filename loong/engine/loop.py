"""The loop that serves real clusters and simulated ones: events in, plans out."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from loong.core.cost.cost_model import CostModel
from loong.core.errors import InvalidPlanError
from loong.core.events import Event
from loong.core.instructions import Instruction, ReleaseKV
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.engine.refusals import Refusals
from loong.executor.protocol import Executor
from loong.scheduler.policy import Policy
from loong.state.cluster_state import ClusterState


class Observer(Protocol):
    """Sees all that the loop does, in order; it must neither change anything nor wait."""

    def on_event(self, event: Event, /) -> None:
        """The state has applied `event`."""
        ...

    def on_plan(
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
        refusals: Refusals | None = None,
    ) -> None:
        """Without `refusals`, a plan that breaks a rule ends the loop with `InvalidPlanError`."""
        self.state, self._policy, self._cost_model, self._executor = state, policy, cost_model, executor
        self._observers, self._refusals = list(observers), refusals

    def observe(self, observer: Observer) -> None:
        """Let another observer see what comes, after all there are."""
        self._observers.append(observer)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Take in every event, hand it on, and act on those there are, until the executor has drained."""
        while events := await self._executor.next_events():
            calls = []
            for event in events:
                self._executor.submit(self.state.apply(event))
                if self.state.needs_plan(event):
                    calls.append(event)
                for observer in self._observers:
                    observer.on_event(event)
                yield event
            is_settled = not calls
            while not is_settled:
                is_settled = self._plan(calls, events[-1].time)

    def _plan(self, calls: Sequence[Event], now: float) -> bool:
        """Start what the policy wants; false if that freed KV or ended requests, for no event will tell."""
        snapshot = self.state.snapshot(now)
        plan, instructions = self._committed(snapshot)
        self._executor.submit(instructions)
        for observer in self._observers:
            observer.on_plan(calls, snapshot, plan, instructions)
        has_freed = any(isinstance(instruction, ReleaseKV) for instruction in instructions)
        return not (has_freed or plan.failures)

    def _committed(self, snapshot: Snapshot) -> tuple[IterationPlan, tuple[Instruction, ...]]:
        """Commit the policy's plan, or what can be done instead if that is refused."""
        plan = self._planned(snapshot)
        try:
            instructions = self.state.commit(plan, snapshot)
        except InvalidPlanError as error:
            if self._refusals is None:
                raise
            plan = self._refusals.amend(snapshot, plan, error)
            return plan, self.state.commit(plan, snapshot)
        if self._refusals is not None:
            self._refusals.accept()
        return plan, instructions

    def _planned(self, snapshot: Snapshot) -> IterationPlan:
        """Return the policy's plan, or what can be done instead if it raises an error.

        A policy is pure, so an error in the middle of it has changed nothing.
        """
        try:
            return self._policy(snapshot, self._cost_model)
        except Exception as error:
            if self._refusals is None:
                raise
            return self._refusals.plan_without_one(self._policy, snapshot, self._cost_model, error)
