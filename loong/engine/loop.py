"""The loop for real and simulated clusters: from events to plans."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.errors import InvalidPlanError
from loong.core.events import Event
from loong.core.instructions import Instruction
from loong.core.observer import Observer
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.engine.refusals import Refusals
from loong.executor.protocol import Executor
from loong.scheduler.policy import Policy
from loong.state.cluster_state import ClusterState


class Scheduling:
    """The loop over a state, a policy and an executor."""

    def __init__(
        self,
        state: ClusterState,
        policy: Policy,
        cost_model: CostModel,
        executor: Executor,
        observers: Sequence[Observer] = (),
        refusals: Refusals | None = None,
    ) -> None:
        """Set up the loop. Without `refusals`, a plan that breaks a rule raises `InvalidPlanError`."""
        self.state, self._policy, self._cost_model, self._executor = state, policy, cost_model, executor
        self._observers, self._refusals = list(observers), refusals

    def observe(self, observer: Observer) -> None:
        """Add an observer, which is called after all earlier ones."""
        self._observers.append(observer)

    async def events(self) -> AsyncGenerator[Event, None]:
        """Apply and yield every event, and plan when events need a plan, until the executor has drained."""
        while events := await self._executor.next_events():
            calls = []
            for event in events:
                applied = self.state.apply(event)
                self._executor.submit(applied.instructions)
                if applied.needs_plan:
                    calls.append(event)
                for observer in self._observers:
                    observer.on_event(event, applied)
                yield event
            is_settled = not calls
            while not is_settled:
                is_settled = self._plan(calls, events[-1].time)

    def _plan(self, calls: Sequence[Event], now: float) -> bool:
        """Commit and submit one plan; return whether the loop can wait for events.

        It must plan again after a plan that freed KV or failed requests, because no event follows from those.
        """
        snapshot = self.state.snapshot(now)
        plan, instructions = self._committed(snapshot)
        self._executor.submit(instructions)
        if misses := self.state.misses(plan):
            plan = replace(plan, decisions=(*plan.decisions, *misses))
        for observer in self._observers:
            observer.on_plan(calls, snapshot, plan, instructions)
        return not (plan.preemptions or plan.evictions or plan.failures)

    def _committed(self, snapshot: Snapshot) -> tuple[IterationPlan, tuple[Instruction, ...]]:
        """Commit the policy's plan, or its replacement if the plan is refused."""
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
        """Return the policy's plan, or a replacement if the policy raises an error.

        A policy is pure, so an error inside it has changed nothing.
        """
        try:
            return self._policy(snapshot, self._cost_model)
        except Exception as error:
            if self._refusals is None:
                raise
            return self._refusals.plan_without_one(self._policy, snapshot, self._cost_model, error)
