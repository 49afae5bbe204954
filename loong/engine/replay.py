"""Replay of recorded events through the production loop. Its plans are compared with the recorded ones."""

from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from loong.core.check_plan import check_plan
from loong.core.cost.cost_model import CostModel
from loong.core.events import Event
from loong.core.instructions import Instruction
from loong.core.observer import Observer
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.engine.loop import Scheduling
from loong.observability.recording.lines import PlanRecord, RefusedPlanRecord, Setting, planned_line
from loong.observability.recording.reader import RecordedStep, Recording
from loong.scheduler.cost.recalibration import RecalibratedCostModel, Recalibration
from loong.scheduler.policy import make_policy
from loong.state.cluster_state import ClusterState


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """The first plan that differs from its record, and the event before it. None stands for no plan."""

    number: int
    event: Event
    recorded: PlanRecord | None
    replayed: PlanRecord | None


@dataclass(frozen=True, slots=True)
class Replay:
    """The number of equal plans, and the first difference, if any."""

    num_plans: int
    difference: PlanDifference | None


async def replay(recording: Recording) -> Replay:
    """Feed the events of a recording to the state and the policy that it names, up to the first difference.

    Raises `ConfigError` if the policy no longer exists, `InvalidPlanError` if it now breaks a rule.
    """
    setting = recording.setting
    recalibration = Recalibration(setting.cost_model)
    cost_model: CostModel = setting.cost_model
    if setting.is_recalibrated:
        cost_model = RecalibratedCostModel(recalibration)
    script = _Script(recording.recorded_steps)
    policy = make_policy(setting.policy, setting.policy_config)
    state = ClusterState(
        setting.instances,
        setting.last_id,
        keeps_prefixes=setting.keeps_prefixes,
        least_saved=setting.least_saved,
        windows=setting.windows,
    )
    scheduling = Scheduling(state, policy, cost_model, script, (recalibration, script))
    async with aclosing(scheduling.events()) as events:
        async for _ in events:
            pass
    return Replay(script.num_plans, script.difference)


def plan_again(setting: Setting, refused: RefusedPlanRecord) -> str | None:
    """Plan again for the snapshot of a refused plan; return the error, or None if the plan is valid.

    Corrections of the cost model are not recorded, so the plan may differ from the refused one.
    """
    policy = make_policy(setting.policy, setting.policy_config)
    try:
        check_plan(refused.snapshot, policy(refused.snapshot, setting.cost_model))
    except Exception as error:  # noqa: BLE001 - any error of the policy is the result
        return f"{type(error).__name__}: {error}"
    return None


class _Script(Observer):
    """An executor that reports recorded events, and an observer that compares plans with the recording."""

    def __init__(self, recorded_steps: Iterable[RecordedStep]) -> None:
        self._recorded_steps = list(recorded_steps)
        self._next = 0  # index in `_recorded_steps`
        self._expected: list[PlanRecord] = []  # of the present recorded step, last first
        self.num_plans = 0
        self.difference: PlanDifference | None = None

    async def next_events(self) -> Sequence[Event]:
        """Return the recorded events up to the next plan, or nothing after a difference."""
        if self._expected and self.difference is None:
            self._differ(self._recorded_steps[self._next - 1].events, self._expected[-1], None)
        if self._next == len(self._recorded_steps) or self.difference is not None:
            return ()
        recorded_step = self._recorded_steps[self._next]
        self._next += 1
        self._expected = recorded_step.plans[::-1]
        return recorded_step.events

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Ignore instructions, because their effects are recorded."""

    def on_plan(
        self,
        events: Sequence[Event],
        _snapshot: Snapshot,
        plan: IterationPlan,
        _instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Compare a plan with its record. The last events may have been recorded without plans."""
        if not self._expected and self._next == len(self._recorded_steps):
            return
        recorded, replayed = self._expected.pop() if self._expected else None, planned_line(plan)
        if recorded is not None and recorded.digest == replayed.digest:
            self.num_plans += 1
        elif self.difference is None:
            self._differ(events, recorded, replayed)

    def _differ(
        self, events: Sequence[Event], recorded: PlanRecord | None, replayed: PlanRecord | None
    ) -> None:
        self.difference = PlanDifference(self.num_plans + 1, events[-1], recorded, replayed)
