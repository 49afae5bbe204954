"""Corrections of a cost model from what its predictions turned out to be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf, log

from loong.core.cost_model import CostModel, PrefillTerms
from loong.core.placement import InstanceId
from loong.core.work import InstanceWork, Phase, StepWork, phase_of

RATE = 0.05  # of what a batch shows to be wrong, corrected at once
LARGEST_RATIO = 1.25  # a batch that was further off counts as if it had been this much
LARGEST_FACTOR = 4.0  # of all corrections together, either way


@dataclass(frozen=True, slots=True)
class Correction:
    """What predictions of one phase are multiplied by, and how far off they still are.

    `error` is the running mean of the relative error of corrected predictions; None before the first batch.
    """

    factor: float = 1.0
    error: float | None = None

    def observe(self, predicted: float, measured: float) -> "Correction":
        """Take in a batch, given what the uncorrected model predicted.

        The factor goes towards where as many batches are slower as are quicker, by at most 1.2 percent.
        """
        ratio = measured / (predicted * self.factor)
        bounded = log(min(max(ratio, 1 / LARGEST_RATIO), LARGEST_RATIO))
        factor = self.factor * exp(RATE * bounded)
        off = min(abs(1 / ratio - 1), 1.0)
        error = off if self.error is None else self.error + RATE * (off - self.error)
        return Correction(min(max(factor, 1 / LARGEST_FACTOR), LARGEST_FACTOR), error)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A correction for each phase."""

    corrections: Mapping[Phase, Correction] = field(
        default_factory=lambda: dict.fromkeys(Phase, Correction())
    )

    def observe(self, phase: Phase, predicted: float, measured: float) -> "Calibration":
        """Take in a batch, given what the uncorrected model predicted; one of no time is ignored."""
        if not (0 < predicted < inf and 0 < measured < inf):
            return self
        correction = self.corrections[phase].observe(predicted, measured)
        return Calibration({**self.corrections, phase: correction})


@dataclass(frozen=True, slots=True)
class CalibratedCostModel:
    """A cost model with every prediction of a step corrected. Migrations are as they were."""

    base: CostModel
    calibration: Calibration

    def step_time(self, work: StepWork, /) -> float:
        """One step of a batch."""
        return self._factor(work.phase) * self.base.step_time(work)

    def instance_time(self, work: InstanceWork, /) -> float:
        """The part of a step that one instance computes by itself, as if the others did the same kind."""
        return self._factor(phase_of((work,))) * self.base.instance_time(work)

    def prefill_terms(self, dop: int, /) -> PrefillTerms:
        """Chunks striped over `dop` instances."""
        terms, factor = self.base.prefill_terms(dop), self._factor(Phase.PREFILL)
        return PrefillTerms(
            overhead=terms.overhead * factor,
            floor=terms.floor * factor,
            per_token=terms.per_token * factor,
            per_cached_pair=terms.per_cached_pair * factor,
            per_new_pair=terms.per_new_pair * factor,
            per_prompt=terms.per_prompt * factor,
        )

    def migration_time(self, num_tokens: int, source_id: InstanceId, destination_id: InstanceId, /) -> float:
        """Moving KV."""
        return self.base.migration_time(num_tokens, source_id, destination_id)

    def _factor(self, phase: Phase) -> float:
        return self.calibration.corrections[phase].factor
