"""Watches the loop, and learns corrections of a cost model from the times of batches.

They follow from events and plans alone, so a replay of these learns the same.
"""

from collections.abc import Mapping

from loong.core.applied import Applied, CommittedBatch
from loong.core.cost.cost_model import CostModel, HostTimes, PrefillTerms
from loong.core.cost.work import InstanceWork, StepWork, batch_work
from loong.core.events import BatchFinished, Event
from loong.core.observer import Observer
from loong.core.placement import InstanceId
from loong.scheduler.cost.calibration import CalibratedCostModel, Calibration, kind_of
from loong.scheduler.cost.idle_tracker import IdleTracker


class Recalibration(Observer):
    """An observer of the loop. Corrections apply if `is_applied`; otherwise plans use `base` unchanged."""

    def __init__(self, base: CostModel, *, is_applied: bool = True) -> None:
        self.base, self.is_applied = base, is_applied
        self.corrected = CalibratedCostModel(base, Calibration())
        self._idle_tracker = IdleTracker(base.host.idle)

    @property
    def errors(self) -> Mapping[str, float]:
        """Return the mean errors of the predictions that plans use, by phase, of those that ran."""
        return self.calibration.errors(is_applied=self.is_applied)

    @property
    def calibration(self) -> Calibration:
        """Return the corrections learned so far."""
        return self.corrected.calibration

    def on_event(self, event: Event, applied: Applied, /) -> None:
        """Compare a finished batch with its prediction."""
        if isinstance(event, BatchFinished) and applied.ended is not None:
            self._learn(applied.ended, event)

    def _learn(self, ended: CommittedBatch, finished: BatchFinished) -> None:
        batch, num_steps = ended.instruction, ended.running.plan.num_steps
        if num_steps != batch.plan.num_steps:  # the lease was extended
            batch = batch.lengthened(num_steps)
        group, started_at = batch.plan.group.instance_ids, ended.running.started_at
        starts_idle = self._idle_tracker.were_idle(group, started_at)
        placements = {given.request_id: given.placement for given in batch.inputs}
        steps = batch_work(batch.plan, placements, finished.num_steps, starts_idle=starts_idle)
        predicted = sum(count * self.base.step_time(work) for work, count in steps)
        seconds = finished.time - started_at if finished.seconds is None else finished.seconds
        calibration = self.calibration.observe(kind_of(steps[0][0]), predicted, seconds)
        self.corrected = CalibratedCostModel(self.base, calibration)
        self._idle_tracker.work(group, finished.time)


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

    def copying_time(self, num_tokens: int, /) -> float:
        """Return the seconds that a batch loses to KV that its instance moves."""
        return self._recalibration.corrected.copying_time(num_tokens)
