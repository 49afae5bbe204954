"""Laws of recalibration: it soon finds a constant error, and outliers of any size do not mislead it."""

from math import inf, nan
from random import Random

import pytest
from chaotic_batches import chaotic_batches
from hypothesis import given
from hypothesis import strategies as st

from loong.core.cost.cost_model import prefill_time
from loong.core.cost.work import Phase, phase_of, step_work
from loong.core.plan import Transfer
from loong.scheduler.cost.calibration import (
    LARGEST_FACTOR,
    WINDOW,
    CalibratedCostModel,
    Calibration,
    Correction,
    Kind,
    kind_of,
    mean_error,
)
from loong.scheduler.cost.cost_model import WorkCostModel

BASE = WorkCostModel()
seconds = st.floats(1e-9, 1e9)


def factor(calibration: Calibration, phase: Phase = Phase.DECODE) -> float:
    return calibration.corrections[Kind(phase)].factor


def error(calibration: Calibration) -> float:
    """Of corrected predictions."""
    return calibration.errors(is_applied=True)["decode"]


def after(ratios: list[float], phase: Phase = Phase.DECODE) -> Calibration:
    calibration = Calibration()
    for ratio in ratios:
        calibration = calibration.observe(Kind(phase), 0.01, 0.01 * ratio)
    return calibration


def after_steps(steps: list[tuple[float, float]], phase: Phase = Phase.MIXED) -> Correction:
    calibration = Calibration()
    for predicted, measured in steps:
        calibration = calibration.observe(Kind(phase), predicted, measured)
    return calibration.corrections[Kind(phase)]


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9, 1.0, 1.1, 5.0])
def test_a_constant_error_is_found_within_ten_batches_and_gone_within_a_window(ratio: float) -> None:
    assert factor(after([ratio] * 10)) == pytest.approx(ratio)
    assert factor(after([ratio] * WINDOW)) == pytest.approx(ratio)
    assert error(after([ratio] * WINDOW)) < 1e-9


@pytest.mark.parametrize("ratio", [0.2, 5.0])
def test_a_change_is_found_within_half_a_window(ratio: float) -> None:
    assert factor(after([1.0] * 200 + [ratio] * 26)) == pytest.approx(ratio)


@given(
    st.floats(0.2, 5),
    st.lists(st.floats(0.9, 1.1), min_size=50, max_size=200),
    st.lists(st.sampled_from((1e-6, 0.2, 1 / 3, 3.0, 5.0, 1e6)), min_size=40, max_size=40),
    st.integers(0, 4),
)
def test_a_factor_is_found_within_50_batches_whatever_one_in_five_of_them_shows(
    true: float, noise: list[float], outliers: list[float], offset: int
) -> None:
    ratios = [true * each for each in noise]
    ratios[offset::5] = outliers[: len(ratios[offset::5])]
    for length in range(50, len(ratios) + 1, 25):
        assert 0.8999 * true <= factor(after(ratios[:length])) <= 1.1001 * true


@pytest.mark.parametrize("outlier", [1e-6, 1e6])
def test_outliers_at_random_cost_a_few_percent(outlier: float) -> None:
    random = Random(1)
    ratios = [outlier if random.random() < 0.2 else random.lognormvariate(0, 0.05) for _ in range(500)]
    for length in range(1, 500):
        assert factor(after(ratios[max(0, length - 2 * WINDOW) : length])) == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("outlier", [1e-6, 1e6])
def test_a_few_slow_batches_at_the_start_teach_nothing(outlier: float) -> None:
    assert factor(after([outlier] * 8)) == 1.0


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=200))
def test_corrections_and_errors_are_never_more_than_is_sane(batches: list[tuple[float, float]]) -> None:
    calibration = Calibration()
    for predicted, measured in batches:
        calibration = calibration.observe(Kind(Phase.DECODE), predicted, measured)
        assert 1 / LARGEST_FACTOR <= factor(calibration) <= LARGEST_FACTOR
        assert 0 <= error(calibration) <= LARGEST_FACTOR - 1


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_an_error_of_1_is_twice_or_half_as_long(ratio: float) -> None:
    assert after([ratio] * 3).errors(is_applied=False)["decode"] == pytest.approx(1.0)


def test_the_window_is_full_after_as_many_batches() -> None:
    for num_batches in (0, 1, WINDOW - 1, WINDOW, 3 * WINDOW):
        is_settled = after([1.0] * num_batches).corrections[Kind(Phase.DECODE)].is_settled
        assert is_settled == (num_batches >= WINDOW)


def test_phases_are_corrected_apart() -> None:
    calibration = after([2.0] * WINDOW, Phase.MIXED)
    assert factor(calibration, Phase.MIXED) == pytest.approx(2.0, rel=0.01)
    for phase in (Phase.PREFILL, Phase.DECODE):
        assert calibration.corrections[Kind(phase)].factor == 1.0
        assert not calibration.corrections[Kind(phase)].batches
    assert calibration.corrections[Kind(Phase.MIXED, Transfer.QUERY)].factor == 1.0


@pytest.mark.parametrize("absurd", [0.0, -1.0, inf, nan])
def test_what_is_no_time_is_ignored(absurd: float) -> None:
    assert Calibration().observe(Kind(Phase.DECODE), absurd, 1.0) == Calibration()
    assert Calibration().observe(Kind(Phase.DECODE), 1.0, absurd) == Calibration()


def test_the_same_batches_give_the_same_corrections() -> None:
    random = Random(2)
    ratios = [random.lognormvariate(0.3, 0.5) for _ in range(100)]
    assert after(ratios) == after(ratios)


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.MIXED])
def test_what_a_step_takes_whatever_is_in_it_is_learned_as_a_delay(phase: Phase) -> None:
    correction = after_steps([(predicted, predicted + 0.1) for predicted in (0.05, 0.017, 0.004) * 9], phase)
    assert correction.delay == pytest.approx(0.1)
    assert correction.seconds(0.03) == pytest.approx(0.13)


def test_a_delay_is_found_while_steps_are_planned_by_what_is_learned() -> None:
    calibration, kind = Calibration(), Kind(Phase.MIXED, Transfer.QUERY)
    for _ in range(WINDOW):  # each step is as large as seems to take 50 ms
        correction = calibration.corrections[kind]
        predicted = max(0.001, (0.05 - correction.delay) / correction.factor)
        calibration = calibration.observe(kind, predicted, predicted + 0.1)
    assert calibration.corrections[kind].delay == pytest.approx(0.1)


@given(st.floats(1.2, 5), st.lists(st.floats(1e-3, 1), min_size=30, max_size=60))
def test_what_grows_with_the_work_is_learned_as_a_factor(true: float, predicted: list[float]) -> None:
    correction = after_steps([(each, true * each) for each in predicted])
    assert correction.factor == pytest.approx(true)
    assert not correction.delay


def test_leases_have_no_delay_for_they_have_many_steps() -> None:
    correction = after_steps([(each, each + 0.1) for each in (0.05, 0.017, 0.004) * 9], Phase.DECODE)
    assert not correction.delay
    assert mean_error(correction.distances()) > 0.5


def test_every_step_is_corrected_by_its_kind() -> None:
    calibration = Calibration()
    for number, kind in enumerate(calibration.corrections):
        for _ in range(WINDOW):
            calibration = calibration.observe(kind, 1.0, 0.5 + 0.2 * number)
    model, waiting = CalibratedCostModel(BASE, calibration), set[bool]()
    for batch, placements in chaotic_batches(range(2)):
        work = step_work(batch, placements)
        waiting.add(kind_of(work).waits)
        expected = BASE.step_time(work) * calibration.corrections[kind_of(work)].factor
        assert model.step_time(work) == pytest.approx(expected)
        for alone in work.instances.values():
            rings = Transfer.KV if alone.num_hops else None
            kind = Kind(phase_of((alone,)), Transfer.QUERY if alone.num_sent_queries else rings)
            expected = BASE.instance_time(alone) * calibration.corrections[kind].factor
            assert model.instance_time(alone) == pytest.approx(expected)
    assert waiting == {False, True}
    for dop in (1, 2):
        expected = prefill_time(BASE, 500, 100, dop)
        expected *= calibration.corrections[Kind(Phase.PREFILL, Transfer.QUERY if dop > 1 else None)].factor
        assert prefill_time(model, 500, 100, dop) == pytest.approx(expected)
    assert model.migration_time(10, 0, 1) == BASE.migration_time(10, 0, 1)
    assert model.served_time(alone) == BASE.served_time(alone)
    assert model.host == BASE.host


def test_a_delay_is_the_groups_and_no_part_of_what_an_instance_computes() -> None:
    calibration = Calibration()
    for predicted in (0.05, 0.017, 0.004) * 9:
        for kind in calibration.corrections:
            calibration = calibration.observe(kind, predicted, predicted + 0.1)
    model = CalibratedCostModel(BASE, calibration)
    assert prefill_time(model, 500, 100, 2) == pytest.approx(prefill_time(BASE, 500, 100, 2) + 0.1)
    for batch, placements in chaotic_batches(range(1)):
        work = step_work(batch, placements)
        if work.phase is not Phase.DECODE:
            assert model.step_time(work) == pytest.approx(BASE.step_time(work) + 0.1)
            for alone in work.instances.values():
                if phase_of((alone,)) is not Phase.DECODE:
                    assert model.instance_time(alone) == BASE.instance_time(alone)
