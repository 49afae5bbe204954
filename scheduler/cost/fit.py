"""Coefficients from measurements: weighted least squares on the relative error, robust to stalls.

Every time is homogeneous of degree 1 in the coefficients, so it is their sum, each times its own derivative.
With the derivatives at the present coefficients the fit is linear, and is repeated until nothing changes
(Gauss-Newton). Coefficients that the samples do not determine keep their prior values.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import TypeAlias

import numpy as np

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import StepWork
from loong.core.placement import InstanceId
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.cost.least_squares import Array, Mask, nonnegative_least_squares, standard_errors
from loong.scheduler.cost.prediction import StepTable

MAX_ROUNDS = 30
TOLERANCE = 1e-3  # of predicted times, relative
CAUTION = 0.1  # in the first round; halved in each that follows
STEP = 1e-6  # of a coefficient, relative, for its derivative
FLOOR = 1e-3  # of a coefficient's prior value, for derivatives
MOST_OFF = 3.0  # errors are relative to predictions, unless these are off by more than this factor
TINY = 1e-12  # seconds: the least step and size of a coefficient
LEAST_NOISE = 0.01  # relative: the least assumed error of a measured time
HUBER = 1.5  # standard deviations beyond which an error counts by its size, not its square
VAGUE = 0.5  # a coefficient with a greater standard error, relative, is not determined by the samples

NAMES = tuple(field.name for field in fields(Coefficients))
# Seconds to start a search from where the prior has none: a search from 0 does not find a delay next to large
# terms. A search may end where `launch` is hidden by computation and is not determined; then the next begins.
LEAST_STARTS = tuple(
    {
        "batch": 1e-3,
        "sent_request": 5e-5,
        "idle_start": 1e-3,
        "beside": 1e-3,
        "beside_group": 1e-3,
        "launch": launch,
        "mixed": 5e-3,
        "exchange_launch": 5e-3,
    }
    for launch in (5e-3, 10e-3)
)


@dataclass(frozen=True, slots=True)
class BatchSample:
    """A batch that ran alone: its steps, with the number of equal ones, and its seconds."""

    steps: tuple[tuple[StepWork, int], ...]
    seconds: float

    def predicted(self, model: CostModel) -> float:
        """Return the seconds that `model` predicts."""
        return sum(count * model.step_time(work) for work, count in self.steps)


@dataclass(frozen=True, slots=True)
class MigrationSample:
    """A migration that ran alone, and its seconds."""

    num_tokens: int
    source_id: InstanceId
    destination_id: InstanceId
    seconds: float

    def predicted(self, model: CostModel) -> float:
        """Return the seconds that `model` predicts."""
        return model.migration_time(self.num_tokens, self.source_id, self.destination_id)


Sample: TypeAlias = BatchSample | MigrationSample


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model, and the names of the coefficients that the samples did not determine."""

    model: WorkCostModel
    undetermined: tuple[str, ...]


def fit(prior: WorkCostModel, samples: Sequence[Sample], names: Collection[str] = NAMES) -> Fit:
    """Return the model nearest to at least one sample; `prior` gives the undetermined coefficients.

    Only coefficients of these `names` change. They are fixed one by one, the least determined first, until
    the samples determine all others.
    """
    predictions = _Predictions(prior, samples)
    for least in LEAST_STARTS:
        found = _fit_from(least, prior, predictions, names)
        if "launch" not in found.undetermined:
            break
    return found


def _fit_from(
    least: Mapping[str, float], prior: WorkCostModel, predictions: "_Predictions", names: Collection[str]
) -> Fit:
    """Return the model that a search from `prior` finds, with starting values of at least `least`."""
    known = np.array(astuple(prior.coefficients))
    start = np.maximum(known, [least.get(name, 0.0) for name in NAMES])
    held = ~np.isin(NAMES, tuple(names))
    values = np.where(held, known, start)
    while True:
        values, doubt = _descend(start, predictions, values, held)
        values = np.where(held, known, values)
        if doubt.max() <= VAGUE:
            undetermined = tuple(name for name, is_held in zip(NAMES, held, strict=True) if is_held)
            return Fit(_with(prior, values), undetermined)
        held[doubt.argmax()] = True
        values = np.where(held, known, values)


def relative_errors(model: CostModel, samples: Sequence[Sample]) -> Array:
    """Return predicted over measured seconds, less 1, of each sample."""
    return np.array([sample.predicted(model) / sample.seconds - 1 for sample in samples])


def contributions(model: WorkCostModel, samples: Sequence[Sample]) -> Array:
    """Return the seconds [samples, coefficients] of each coefficient in each prediction."""
    values = np.array(astuple(model.coefficients))
    seconds: Array = _Predictions(model, samples).jacobian(values) * values
    return seconds


def _descend(start: Array, predictions: "_Predictions", values: Array, held: Mask) -> tuple[Array, Array]:
    """Return the best coefficients with those `held` fixed, and relative standard errors of the others."""
    seconds = predictions.measured
    scale, weights = seconds, np.ones(len(seconds))
    for number in range(MAX_ROUNDS):
        # The floor lets a coefficient that became 0 return where its derivative at 0 is 0 too.
        values = np.maximum(values, FLOOR * start)
        shares = predictions.jacobian(values) / scale[:, None]
        step = _Step(shares, seconds / scale, weights, caution=CAUTION / 2**number)
        before, (values, errors) = values, step.solve(values, np.maximum(values, start), held)
        predicted = shares @ values
        weights = _huber(seconds / scale - predicted)
        scale = np.clip(scale * predicted, seconds / MOST_OFF, seconds * MOST_OFF)
        if np.max(np.abs(predicted - shares @ before)) < TOLERANCE:
            break
    size = np.maximum(values, start)
    known = np.divide(errors, size, out=np.zeros_like(errors), where=size > 0)
    return values, np.where(np.isinf(errors), errors, known)


def _with(model: WorkCostModel, values: Array) -> WorkCostModel:
    return replace(model, coefficients=Coefficients(*map(float, values)))


class _Predictions:
    """Samples as tables, for predictions with varying coefficients."""

    def __init__(self, model: WorkCostModel, samples: Sequence[Sample]) -> None:
        self.measured = np.array([sample.seconds for sample in samples])
        self._model = model
        batches = [(i, sample) for i, sample in enumerate(samples) if isinstance(sample, BatchSample)]
        self._migrations = [
            (i, sample) for i, sample in enumerate(samples) if isinstance(sample, MigrationSample)
        ]
        self._batch_ids = np.array([i for i, _ in batches], dtype=int)
        steps = [step for _, batch in batches for step in batch.steps]
        self._table = StepTable.of(model, [work for work, _ in steps])
        self._counts = np.array([count for _, count in steps], dtype=float)
        self._starts = np.cumsum([0, *(len(batch.steps) for _, batch in batches)], dtype=int)[:-1]

    def jacobian(self, values: Array) -> Array:
        """Return the derivatives [samples, coefficients] of predicted seconds at these coefficients."""
        steps = np.maximum(values * STEP, TINY)
        seconds = self._seconds(np.vstack((values, values + np.diag(steps))))
        derivatives: Array = ((seconds[1:] - seconds[0]) / steps[:, None]).T
        return derivatives

    def _seconds(self, sets: Array) -> Array:
        """Return the seconds [sets, samples] that each of the `sets` of coefficients predicts."""
        seconds = np.zeros((len(sets), len(self.measured)))
        if len(self._batch_ids):
            steps = self._table.seconds(sets) * self._counts
            seconds[:, self._batch_ids] = np.add.reduceat(steps, self._starts, axis=1)
        for values, row in zip(sets, seconds, strict=True) if self._migrations else ():
            model = _with(self._model, values)
            for index, migration in self._migrations:
                row[index] = migration.predicted(model)
        return seconds


@dataclass(frozen=True, slots=True)
class _Step:
    """A linear least-squares problem: `shares @ values` is to be near `target`.

    `caution` is the error that samples may keep on average rather than let a coefficient change by its size.
    """

    shares: Array  # [samples, coefficients]
    target: Array  # [samples]
    weights: Array  # [samples]
    caution: float

    def solve(self, values: Array, size: Array, held: Mask) -> tuple[Array, Array]:
        """Return the best values >= 0, given the previous values and their sizes, with standard errors.

        Those `held` stay and have no error. Those that no sample depends on stay, with an infinite error.
        """
        is_determined = np.logical_and(~held, self.shares.any(axis=0))
        result, errors = values.copy(), np.where(held, 0.0, np.inf)
        if is_determined.any():
            root = np.sqrt(self.weights)
            rows = self.shares[:, is_determined] * root[:, None]
            rest = (self.target - self.shares[:, ~is_determined] @ values[~is_determined]) * root
            pull = self.caution * np.sqrt(len(rows)) / np.maximum(size[is_determined], TINY)
            result[is_determined] = nonnegative_least_squares(
                np.vstack((rows, np.diag(pull))), np.concatenate((rest, pull * values[is_determined]))
            )
            deviation = _deviation(self.target - self.shares @ result)
            errors[is_determined] = deviation * standard_errors(rows)
        return result, errors


def _huber(errors: Array) -> Array:
    """Return weights: 1 for an error of the usual size, less for a much larger one."""
    return np.minimum(1.0, HUBER * _deviation(errors) / np.maximum(np.abs(errors), LEAST_NOISE))


def _deviation(errors: Array) -> float:
    """Return the standard deviation, estimated from the median: stalls do not increase it."""
    return max(LEAST_NOISE, 1.48 * float(np.median(np.abs(errors))))
