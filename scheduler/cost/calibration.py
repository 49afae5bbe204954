"""Corrections of a cost model, learned from the errors of its predictions."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import exp, inf, log
from statistics import fmean, median
from typing import NamedTuple

from loong.core.cost.cost_model import CostModel, HostTimes, PrefillTerms
from loong.core.cost.work import InstanceWork, Phase, StepWork, phase_with
from loong.core.placement import InstanceId
from loong.core.plan import Transfer

WINDOW = 51  # batches of a kind that count
NUM_BELIEVED = 9  # correct predictions assumed before the first batch, while the window has room
LARGEST_FACTOR = 16.0  # either way; an error counts as at most this factor
_FARTHEST = log(LARGEST_FACTOR)
DELAY_MARGIN = 0.9  # a delay is used if its errors are less than this share of a factor's


class Kind(NamedTuple):
    """Batches that are corrected together: by their phase, the kind of transfer, and who answers queries."""

    phase: Phase
    transfer: Transfer | None = None  # queries if both travel
    waits: bool = False  # for holders that run batches of their own


class Timed(NamedTuple):
    """Seconds of a batch."""

    predicted: float  # by the uncorrected model
    measured: float


@dataclass(frozen=True, slots=True)
class Correction:
    """A factor for predictions of one kind, or a delay that is added to each of their steps.

    Both are medians: as many of the last batches were slower as faster. So outliers do not change them while
    most batches of the window are alike. A change is learned as soon as most of the window has it, at first
    after ten batches.

    A delay does not depend on the content of a step. If it were learned as a factor, steps would be planned
    smaller, which would increase the factor, and make steps smaller still.
    """

    batches: tuple[Timed, ...] = ()  # the last
    factor: float = 1.0
    delay: float = 0.0  # seconds a step

    @property
    def is_settled(self) -> bool:
        """Return whether the window is full."""
        return len(self.batches) == WINDOW

    def observe(self, predicted: float, measured: float, *, may_delay: bool) -> "Correction":
        """Record a batch of one step; of more steps only if `may_delay` is false."""
        batches = (*self.batches[1 - WINDOW :], Timed(predicted, measured))
        num_believed = min(NUM_BELIEVED, WINDOW - len(batches))
        ratios = [measured / predicted for predicted, measured in batches]
        by_factor = Correction(batches, _bounded(median((*(1.0,) * num_believed, *ratios))))
        if not may_delay or by_factor.factor <= 1:
            return by_factor
        delays = [measured - predicted for predicted, measured in batches]
        by_delay = Correction(batches, delay=max(0.0, median((*(0.0,) * num_believed, *delays))))
        is_better = fmean(by_delay.distances()) < DELAY_MARGIN * fmean(by_factor.distances())
        return by_delay if is_better else by_factor

    def seconds(self, predicted: float) -> float:
        """Return the corrected prediction of a step."""
        return self.factor * predicted + self.delay

    def distances(self, *, is_applied: bool = True) -> list[float]:
        """Return the errors of the window's batches, corrected or not: |log| of the ratio."""
        factor, delay = (self.factor, self.delay) if is_applied else (1.0, 0.0)
        distances = [
            abs(log(measured / (factor * predicted + delay))) for predicted, measured in self.batches
        ]
        return [min(distance, _FARTHEST) for distance in distances]


def mean_error(distances: Iterable[float]) -> float:
    """Return the geometric mean of at least one error: 1 is twice or half as long."""
    return exp(fmean(distances)) - 1


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1 / LARGEST_FACTOR), LARGEST_FACTOR)


def _uncorrected() -> dict[Kind, Correction]:
    return {Kind(*kind): Correction() for kind in product(Phase, (None, *Transfer), (False, True))}


@dataclass(frozen=True, slots=True)
class Calibration:
    """A correction for each kind of batch."""

    corrections: Mapping[Kind, Correction] = field(default_factory=_uncorrected)

    def observe(self, kind: Kind, predicted: float, measured: float) -> "Calibration":
        """Return the calibration after a batch, with the uncorrected prediction.

        A batch of no time is ignored.

        Batches of decodes have many steps, the others one.
        """
        if not (0 < predicted < inf and 0 < measured < inf):
            return self
        may_delay = kind.phase is not Phase.DECODE
        correction = self.corrections[kind].observe(predicted, measured, may_delay=may_delay)
        return Calibration({**self.corrections, kind: correction})

    def of(self, work: StepWork) -> Correction:
        """Return the correction of such a step."""
        return self.corrections[kind_of(work)]

    def errors(self, *, is_applied: bool) -> Mapping[str, float]:
        """Return the mean errors of predictions, corrected or not, by phase, of those that ran."""
        by_phase: dict[str, list[float]] = {}
        for kind, correction in self.corrections.items():
            by_phase.setdefault(kind.phase.value, []).extend(correction.distances(is_applied=is_applied))
        return {phase: mean_error(distances) for phase, distances in by_phase.items() if distances}


def _transfer(has_exchange: bool, has_ring: bool) -> Transfer | None:
    if has_exchange:
        return Transfer.QUERY
    return Transfer.KV if has_ring else None


def kind_of(work: StepWork) -> Kind:
    """Return the kind of a batch with such a step."""
    waits = not work.idle_holder_ids.issuperset(work.holders)
    return Kind(work.phase, _transfer(work.has_exchange, work.has_ring), waits)


@dataclass(frozen=True, slots=True)
class CalibratedCostModel:
    """A cost model with every prediction of a step corrected. Serving and migration are unchanged."""

    base: CostModel
    calibration: Calibration
    _factors: Mapping[tuple[bool, bool, bool, bool], float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the factors of all kinds of an instance's work, which plans read often."""
        factors = {}
        for does in product((False, True), repeat=4):
            has_prefill, has_decode, has_exchange, has_ring = does
            kind = Kind(phase_with(has_prefill, has_decode), _transfer(has_exchange, has_ring))
            factors[does] = self.calibration.corrections[kind].factor
        object.__setattr__(self, "_factors", factors)

    @property
    def host(self) -> HostTimes:
        """The times of the base, which are not corrected."""
        return self.base.host

    def step_time(self, work: StepWork, /) -> float:
        """Return the seconds of one step of a batch."""
        return self.calibration.of(work).seconds(self.base.step_time(work))

    def served_time(self, work: InstanceWork, /) -> float:
        """Return the uncorrected seconds that an instance's own batch loses to a step of others."""
        return self.base.served_time(work)

    def instance_time(self, work: InstanceWork, /) -> float:
        """Return the seconds of one instance's part of a step, as if the others did the same kind.

        Delays belong to the group, and are not in it.
        """
        has_prefill, has_decode = work.num_keys > 0, work.num_decode_keys > 0
        does = has_prefill, has_decode, work.num_sent_queries > 0, work.num_hops > 0
        return self._factors[does] * self.base.instance_time(work)

    def prefill_terms(self, dop: int, /) -> PrefillTerms:
        """Return the terms of chunks striped over `dop` instances."""
        terms = self.base.prefill_terms(dop)
        correction = self.calibration.corrections[Kind(Phase.PREFILL, _transfer(dop > 1, False))]
        factor = correction.factor
        return PrefillTerms(
            overhead=correction.seconds(terms.overhead),
            floor=terms.floor * factor,
            per_token=terms.per_token * factor,
            per_cached_pair=terms.per_cached_pair * factor,
            per_new_pair=terms.per_new_pair * factor,
            per_prompt=terms.per_prompt * factor,
            launch=terms.launch * factor,
        )

    def migration_time(self, num_tokens: int, source_id: InstanceId, destination_id: InstanceId, /) -> float:
        """Return the seconds to move KV."""
        return self.base.migration_time(num_tokens, source_id, destination_id)

    def copying_time(self, num_tokens: int, /) -> float:
        """Return the uncorrected seconds that a batch loses to KV that its instance moves."""
        return self.base.copying_time(num_tokens)
