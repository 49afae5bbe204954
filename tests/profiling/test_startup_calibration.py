"""A server on processors begins with a cost model of the machine that it runs on."""

import asyncio
import logging
from dataclasses import astuple, replace
from random import Random

import numpy as np
import pytest
from profile_samples import profile_samples
from simulation import instances_with

from loong.executor.simulated import SimulatedExecutor
from loong.profiling.scenarios import LEAST_ROOM, LONG_PROMPT_TOKENS
from loong.profiling.startup import calibrate
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.cost.fit import BatchSample, Sample, relative_errors

SECONDS = 4.0
PRIOR = WorkCostModel()


def calibrated(
    clock: WorkCostModel, kv_capacity: int = 8192, seconds: float = SECONDS
) -> tuple[WorkCostModel, int]:
    """The cost model that is found where batches take what `clock` says, and the last id that was taken."""
    executor = SimulatedExecutor(clock, [])

    async def pause(length: float) -> None:
        executor.pause(length)

    return asyncio.run(calibrate(PRIOR, instances_with([kv_capacity] * 4), executor, seconds, pause))


def typical_error(model: WorkCostModel, clock: WorkCostModel) -> float:
    samples: list[Sample] = [
        replace(sample, seconds=sample.predicted(clock))
        for sample in profile_samples(10)
        if isinstance(sample, BatchSample)
    ]
    return float(np.median(np.abs(relative_errors(model, samples))))


@pytest.mark.parametrize("seed", range(3))
def test_batches_before_the_first_request_measure_the_machine(seed: int) -> None:
    random = Random(seed)
    factors = (random.choice((0.3, 1.0, 3.0)) for _ in astuple(PRIOR.coefficients))
    values = (value * factor for value, factor in zip(astuple(PRIOR.coefficients), factors, strict=True))
    clock = replace(PRIOR, coefficients=Coefficients(*values))
    found, _ = calibrated(clock)
    assert typical_error(found, clock) < 0.1


def test_few_batches_of_a_slow_machine_scale_the_model() -> None:
    found, last_id = calibrated(PRIOR.scaled(50))
    assert last_id < 60
    assert astuple(found.coefficients) == pytest.approx(astuple(PRIOR.scaled(50).coefficients), rel=1e-3)


@pytest.mark.parametrize(("step", "token"), [(200, 20), (50, 200)])
def test_few_batches_determine_what_a_step_costs_besides_its_tokens(step: float, token: float) -> None:
    known = PRIOR.coefficients
    clock = replace(PRIOR, coefficients=replace(known, step=step * known.step, token=token * known.token))
    found, last_id = calibrated(clock)
    assert last_id < 60
    for num_tokens in (2, LONG_PROMPT_TOKENS):
        expected = clock.prefill_terms(1).time(num_tokens, 0, num_tokens**2)
        assert found.prefill_terms(1).time(num_tokens, 0, num_tokens**2) == pytest.approx(expected, rel=0.1)


def test_the_log_says_in_one_line_what_was_gained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    calibrated(PRIOR.scaled(3))
    (record,) = caplog.records
    assert record.message.startswith("calibrated the cost model by ")
    assert "0% (decode), 0% (mixed), 0% (prefill) instead of 200% (decode)" in record.message


@pytest.mark.parametrize(("kv_capacity", "seconds"), [(LEAST_ROOM - 1, SECONDS), (8192, 0.0)])
def test_without_room_or_time_nothing_is_measured(kv_capacity: int, seconds: float) -> None:
    assert calibrated(PRIOR.scaled(3), kv_capacity, seconds) == (PRIOR, 0)
