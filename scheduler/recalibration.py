"""Watches the loop, and learns from the batches that it timed how to correct a cost model.

What is learned follows from the events and the plans alone, so whoever replays these learns the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loong.core.cost_model import CostModel, PrefillTerms
from loong.core.events import BatchFinished, Event, InstanceLost
from loong.core.instance import ESPGroup
from loong.core.instructions import Instruction, RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.core.work import InstanceWork, Phase, StepWork, step_work
from loong.scheduler.calibration import CalibratedCostModel, Calibration


@dataclass(frozen=True, slots=True)
class _Running:
    """A batch in flight: what the uncorrected model predicts for its first step, and for each later one."""

    group: ESPGroup
    phase: Phase
    started_at: float
    first: float
    later: float


class Recalibration:
    """An observer of the loop."""

    def __init__(self, base: CostModel) -> None:
        self.base = base
        self.calibration = Calibration()
        self._running: dict[int, _Running] = {}

    @property
    def errors(self) -> Mapping[str, float]:
        """The running relative error of corrected predictions, by phase, of those that ran."""
        corrections = self.calibration.corrections
        return {phase.value: c.error for phase, c in corrections.items() if c.error is not None}

    def took_in(self, event: Event, /) -> None:
        """Compare what has finished with what was predicted."""
        match event:
            case BatchFinished():
                if (running := self._running.pop(event.batch_id, None)) is not None:
                    predicted = running.first + (event.num_steps - 1) * running.later
                    measured = event.time - running.started_at
                    self.calibration = self.calibration.observe(running.phase, predicted, measured)
            case InstanceLost():
                kept = (b for b in self._running.items() if event.instance_id not in b[1].group.instance_ids)
                self._running = dict(kept)
            case _:
                pass

    def planned(
        self, event: Event, _snapshot: Snapshot, _plan: IterationPlan, instructions: Sequence[Instruction], /
    ) -> None:
        """Predict what starts."""
        for batch in instructions:
            if isinstance(batch, RunBatch):
                placements = {given.request_id: given.placement for given in batch.inputs}
                work = step_work(batch.plan, placements)
                first = later = self.base.step_time(work)
                if work.is_lease:
                    later = self.base.step_time(step_work(batch.plan, placements, batch.plan.num_steps // 2))
                running = _Running(batch.plan.group, work.phase, event.time, first, later)
                self._running[batch.batch_id] = running


class RecalibratedCostModel:
    """A cost model as corrected by what is known at the time it is asked."""

    def __init__(self, recalibration: Recalibration) -> None:
        self._recalibration = recalibration

    def step_time(self, work: StepWork, /) -> float:
        """One step of a batch."""
        return self._model.step_time(work)

    def instance_time(self, work: InstanceWork, /) -> float:
        """The part of a step that one instance computes by itself."""
        return self._model.instance_time(work)

    def prefill_terms(self, dop: int, /) -> PrefillTerms:
        """Chunks striped over `dop` instances."""
        return self._model.prefill_terms(dop)

    def migration_time(self, num_tokens: int, source_id: InstanceId, destination_id: InstanceId, /) -> float:
        """Moving KV."""
        return self._model.migration_time(num_tokens, source_id, destination_id)

    @property
    def _model(self) -> CalibratedCostModel:
        return CalibratedCostModel(self._recalibration.base, self._recalibration.calibration)
