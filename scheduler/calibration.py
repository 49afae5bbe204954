"""Corrections of a cost model from what its predictions turned out to be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, inf, log
from statistics import fmean, median

from loong.core.cost_model import CostModel, PrefillTerms
from loong.core.placement import InstanceId
from loong.core.work import InstanceWork, Phase, StepWork, phase_of

WINDOW = 51  # batches of a phase that count
NUM_BELIEVED = 9  # predictions taken to have come true before the first batch, while the window has room
LARGEST_FACTOR = 16.0  # either way; in errors, a batch that was further off counts as if by this much


@dataclass(frozen=True, slots=True)
class Correction:
    """What predictions of one phase are multiplied by: as many of the last batches were slower as quicker.

    So while most of the batches in the window are alike, the factor is as one of theirs, whatever the others
    were; and a change is learned as soon as most of the window has seen it, at first after ten batches.
    """

    ratios: tuple[float, ...] = ()  # measured to predicted times of the last batches, uncorrected
    factor: float = 1.0

    @property
    def is_settled(self) -> bool:
        """Whether the window is full."""
        return len(self.ratios) == WINDOW

    def observe(self, predicted: float, measured: float) -> "Correction":
        """Take in a batch, given what the uncorrected model predicted."""
        ratios = (*self.ratios[1 - WINDOW :], measured / predicted)
        believed = (1.0,) * min(NUM_BELIEVED, WINDOW - len(ratios))
        return Correction(ratios, _bounded(median((*believed, *ratios))))

    def error(self, factor: float) -> float:
        """How far predictions times `factor` are from the window's batches: 1 is twice or half as long.

        The geometric mean, of at least one batch.
        """
        return exp(fmean(abs(log(_bounded(ratio / factor))) for ratio in self.ratios)) - 1


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / LARGEST_FACTOR), LARGEST_FACTOR)


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
