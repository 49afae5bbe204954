"""What recalibration owes: it finds a constant error, and no outlier, however large, moves it far."""

from math import inf, nan
from random import Random

import pytest
from chaotic_batches import chaotic_batches
from hypothesis import given
from hypothesis import strategies as st

from loong.core.cost_model import prefill_time
from loong.core.work import Phase, phase_of, step_work
from loong.scheduler.calibration import LARGEST_FACTOR, CalibratedCostModel, Calibration
from loong.scheduler.cost_model import WorkCostModel

BASE = WorkCostModel()
seconds = st.floats(1e-9, 1e9)


def factor(calibration: Calibration, phase: Phase = Phase.DECODE) -> float:
    return calibration.corrections[phase].factor


def error(calibration: Calibration, phase: Phase = Phase.DECODE) -> float:
    result = calibration.corrections[phase].error
    assert result is not None
    return result


def after(ratios: list[float], phase: Phase = Phase.DECODE) -> Calibration:
    calibration = Calibration()
    for ratio in ratios:
        calibration = calibration.observe(phase, 0.01, 0.01 * ratio)
    return calibration


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.1, 3.0])
def test_a_constant_error_is_found_and_then_gone(ratio: float) -> None:
    calibration = after([ratio] * 300)
    assert factor(calibration) == pytest.approx(ratio, rel=0.01)
    assert error(calibration) < 0.02


@pytest.mark.parametrize("outlier", [1e-6, 1e6])
def test_a_tenth_of_outliers_of_any_size_costs_a_few_percent(outlier: float) -> None:
    random = Random(1)
    ratios = [outlier if random.random() < 0.1 else random.lognormvariate(0, 0.05) for _ in range(500)]
    assert factor(after(ratios)) == pytest.approx(1.0, abs=0.08)


@given(st.lists(st.tuples(seconds, seconds), max_size=400))
def test_a_batch_moves_the_correction_by_little_and_all_together_by_no_more_than_is_sane(
    batches: list[tuple[float, float]],
) -> None:
    calibration = Calibration()
    for predicted, measured in batches:
        before, calibration = factor(calibration), calibration.observe(Phase.DECODE, predicted, measured)
        assert factor(calibration) == pytest.approx(before, rel=0.012)
        assert 1 / LARGEST_FACTOR <= factor(calibration) <= LARGEST_FACTOR
        assert 0 <= error(calibration) <= 1


def test_phases_are_corrected_apart() -> None:
    calibration = after([2.0] * 300, Phase.MIXED)
    assert factor(calibration, Phase.MIXED) == pytest.approx(2.0, rel=0.01)
    for phase in (Phase.PREFILL, Phase.DECODE):
        assert calibration.corrections[phase].factor == 1.0
        assert calibration.corrections[phase].error is None


@pytest.mark.parametrize("absurd", [0.0, -1.0, inf, nan])
def test_what_is_no_time_is_ignored(absurd: float) -> None:
    assert Calibration().observe(Phase.DECODE, absurd, 1.0) == Calibration()
    assert Calibration().observe(Phase.DECODE, 1.0, absurd) == Calibration()


def test_the_same_batches_give_the_same_corrections() -> None:
    random = Random(2)
    ratios = [random.lognormvariate(0.3, 0.5) for _ in range(100)]
    assert after(ratios) == after(ratios)


def test_every_step_is_corrected_by_its_phase() -> None:
    calibration = Calibration()
    for phase, ratio in zip(Phase, (0.5, 2.0, 3.0), strict=True):
        for _ in range(300):
            calibration = calibration.observe(phase, 1.0, ratio)
    model = CalibratedCostModel(BASE, calibration)
    for batch, placements in chaotic_batches(range(2)):
        work = step_work(batch, placements)
        assert model.step_time(work) == pytest.approx(BASE.step_time(work) * factor(calibration, work.phase))
        alone = max(work.instances.values(), key=BASE.instance_time)
        if phase_of((alone,)) is work.phase:
            expected = BASE.instance_time(alone) * factor(calibration, work.phase)
            assert model.instance_time(alone) == pytest.approx(expected)
    expected = prefill_time(BASE, 500, 100, 2) * factor(calibration, Phase.PREFILL)
    assert prefill_time(model, 500, 100, 2) == pytest.approx(expected)
    assert model.migration_time(10, 0, 1) == BASE.migration_time(10, 0, 1)
