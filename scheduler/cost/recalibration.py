"""Watches the loop, and learns corrections of a cost model from the times of batches.

They follow from events and plans alone, so a replay of these learns the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loong.core.cost.cost_model import CostModel, HostTimes, PrefillTerms
from loong.core.cost.work import InstanceWork, StepWork, batch_work
from loong.core.events import BatchFinished, BatchStarted, Event, InstanceLost
from loong.core.instructions import ExtendLease, Instruction, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.scheduler.cost.calibration import CalibratedCostModel, Calibration, kind_of
from loong.scheduler.cost.idle_tracker import IdleTracker


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch, with the time of its start, or of its submission if it has not started."""

    batch: RunBatch
    started_at: float


class Recalibration:
    """An observer of the loop. Corrections apply if `is_applied`; otherwise plans use `base` unchanged."""

    def __init__(self, base: CostModel, *, is_applied: bool = True) -> None:
        self.base, self.is_applied = base, is_applied
        self.corrected = CalibratedCostModel(base, Calibration())
        self._running: dict[int, _Running] = {}
        self._idle_tracker = IdleTracker(base.host.idle)

    @property
    def errors(self) -> Mapping[str, float]:
        """Return the mean errors of the predictions that plans use, by phase, of those that ran."""
        return self.calibration.errors(is_applied=self.is_applied)

    @property
    def calibration(self) -> Calibration:
        """Return the corrections learned so far."""
        return self.corrected.calibration

    def on_event(self, event: Event, /) -> None:
        """Compare a finished batch with its prediction."""
        match event:
            case BatchStarted():
                if (running := self._running.get(event.batch_id)) is not None:
                    self._running[event.batch_id] = replace(running, started_at=event.time)
            case BatchFinished():
                if (running := self._running.pop(event.batch_id, None)) is not None:
                    self._learn(running, event)
                    self._idle_tracker.work(running.batch.plan.group.instance_ids, event.time)
            case InstanceLost():
                self._running = {
                    batch_id: running
                    for batch_id, running in self._running.items()
                    if event.instance_id not in running.batch.participant_ids
                    and batch_id not in event.void_batch_ids
                }
            case _:
                pass

    def on_plan(
        self,
        _events: Sequence[Event],
        snapshot: Snapshot,
        _plan: IterationPlan,
        instructions: Sequence[Instruction],
        /,
    ) -> None:
        """Record batches that start or are extended."""
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                self._running[instruction.batch_id] = _Running(instruction, snapshot.now)
            elif isinstance(instruction, ExtendLease):
                running = self._running[instruction.batch_id]
                self._running[instruction.batch_id] = replace(
                    running, batch=running.batch.lengthened(instruction.num_steps)
                )

    def _learn(self, running: _Running, finished: BatchFinished) -> None:
        batch, group = running.batch, running.batch.plan.group.instance_ids
        starts_idle = self._idle_tracker.were_idle(group, running.started_at)
        placements = {given.request_id: given.placement for given in batch.inputs}
        steps = batch_work(batch.plan, placements, finished.num_steps, starts_idle=starts_idle)
        predicted = sum(count * self.base.step_time(work) for work, count in steps)
        seconds = finished.time - running.started_at if finished.seconds is None else finished.seconds
        calibration = self.calibration.observe(kind_of(steps[0][0]), predicted, seconds)
        self.corrected = CalibratedCostModel(self.base, calibration)


class RecalibratedCostModel:
    """A cost model with the corrections known at the time of each call."""

    def __init__(self, recalibration: Recalibration) -> None:
        self._recalibration = recalibration

    @property
    def host(self) -> HostTimes:
        """The times of the base, which are not corrected."""
        return self._recalibration.base.host

    def step_time(self, work: StepWork, /) -> float:
        """Return the seconds of one step of a batch."""
        return self._recalibration.corrected.step_time(work)

    def served_time(self, work: InstanceWork, /) -> float:
        """Return the seconds that an instance's own batch loses to a step of others."""
        return self._recalibration.corrected.served_time(work)

    def instance_time(self, work: InstanceWork, /) -> float:
        """Return the seconds of the part of a step that one instance computes by itself."""
        return self._recalibration.corrected.instance_time(work)

    def prefill_terms(self, dop: int, /) -> PrefillTerms:
        """Return the terms of chunks striped over `dop` instances."""
        return self._recalibration.corrected.prefill_terms(dop)

    def migration_time(self, num_tokens: int, source_id: InstanceId, destination_id: InstanceId, /) -> float:
        """Return the seconds to move KV."""
        return self._recalibration.corrected.migration_time(num_tokens, source_id, destination_id)
