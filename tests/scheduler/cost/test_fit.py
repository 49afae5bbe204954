"""Laws of the fit: the truth where samples determine it, the prior where they do not, and no failure."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from random import Random

import numpy as np
import pytest
from examples import seeds
from profile_samples import profile_samples

from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.cost.fit import (
    NAMES,
    BatchSample,
    Fit,
    MigrationSample,
    Sample,
    contributions,
    fit,
    relative_errors,
)

PRIOR = WorkCostModel(
    Coefficients(
        batch=0.5e-3,
        sent_request=50e-6,
        step=1e-3,
        member=0.2e-3,
        settle=0.3e-3,
        exchange=1e-3,
        ring=1e-3,
        segment=10e-6,
        weights=1e-3,
        token=10e-6,
        attend=200e-6,
        decode_key=0.5e-6,
        key=1e-6,
        pair=20e-9,
        ring_key=1e-6,
        sent_query=3e-6,
        kept_key=3e-6,
    )
)

UNSEEN = 10  # the seed of samples that no fit here is given


def another_model(seed: int) -> WorkCostModel:
    """Every coefficient is off, by a factor of up to three."""
    random = Random(seed)
    values = (value * 3 ** random.uniform(-1, 1) for value in astuple(PRIOR.coefficients))
    return replace(PRIOR, coefficients=Coefficients(*values))


def samples_of(model: WorkCostModel, seed: int) -> list[Sample]:
    """Return the times of random valid plans by `model`."""
    return [replace(sample, seconds=sample.predicted(model)) for sample in profile_samples(seed)]


def changed(samples: Sequence[Sample], factor: Callable[[], float]) -> list[Sample]:
    return [replace(sample, seconds=sample.seconds * factor()) for sample in samples]


def typical_error(found: Fit, samples: Sequence[Sample]) -> float:
    return float(np.median(np.abs(relative_errors(found.model, samples))))


@pytest.mark.parametrize("seed", seeds(1, thorough=4))
def test_coefficients_are_recovered_from_samples_without_noise(seed: int) -> None:
    truth = another_model(seed)
    found = fit(PRIOR, samples_of(truth, seed))
    assert np.abs(relative_errors(found.model, samples_of(truth, UNSEEN))).max() < 0.01
    for name in set(NAMES) - set(found.undetermined):
        expected = getattr(truth.coefficients, name)
        tolerance = pytest.approx(expected, rel=0.1, abs=1e-8 if expected else 1e-7)
        assert getattr(found.model.coefficients, name) == tolerance, name


def test_what_the_samples_do_not_report_stays_and_is_named() -> None:
    truth = another_model(1)
    batches = [s for s in samples_of(truth, 1) if isinstance(s, BatchSample)]
    alone = [s for s in batches if s.steps[0][0].group.dop == 1 and not s.steps[0][0].holders]
    found = fit(PRIOR, alone)
    unreported = {"member", "settle", "ring", "exchange", "ring_key", "sent_query", "message", "moved_key"}
    assert unreported < set(found.undetermined)
    for name in found.undetermined:
        assert getattr(found.model.coefficients, name) == getattr(PRIOR.coefficients, name)


@pytest.mark.parametrize("seed", seeds(1, thorough=4))
def test_noise_leaves_an_error_that_is_smaller_than_itself(seed: int) -> None:
    truth, random = another_model(seed), Random(seed)
    noisy = changed(samples_of(truth, seed), lambda: random.lognormvariate(0, 0.1))
    assert typical_error(fit(PRIOR, noisy), samples_of(truth, UNSEEN)) < 0.05


@pytest.mark.parametrize("seed", seeds(1, thorough=4))
def test_a_tenth_of_samples_that_stalled_changes_little(seed: int) -> None:
    truth, random = another_model(seed), Random(seed)
    stalled = changed(samples_of(truth, seed), lambda: random.uniform(2, 30) if random.random() < 0.1 else 1)
    assert typical_error(fit(PRIOR, stalled), samples_of(truth, UNSEEN)) < 0.05


def test_samples_that_contradict_each_other_report_nothing() -> None:
    seconds = [10.0**exponent for exponent in range(-3, 4)]
    found = fit(PRIOR, [MigrationSample(1000, 0, 1, each) for each in seconds])
    assert set(found.undetermined) == set(NAMES)
    assert found.model == PRIOR


def test_what_the_coefficients_contribute_adds_up_to_what_is_predicted() -> None:
    samples = samples_of(another_model(0), 0)
    predicted = [sample.predicted(PRIOR) for sample in samples]
    np.testing.assert_allclose(contributions(PRIOR, samples).sum(axis=1), predicted, rtol=1e-6)


def test_no_coefficient_is_negative_whatever_the_samples_say() -> None:
    random = Random(0)
    for first in range(2):
        absurd = changed(samples_of(PRIOR, 0)[first::40], lambda: 10 ** random.uniform(-2, 2))
        assert min(astuple(fit(PRIOR, absurd).model.coefficients)) >= 0
