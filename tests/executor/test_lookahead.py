"""How long before a batch's predicted end the next one is planned."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from plans import prefill
from snapshots import waiting

from loong.executor.lookahead import NUM_PLANS, SENDING_SHARE, LookaheadMargin, PlanningTimes
from loong.scheduler.cost.cost_model import DEFAULT_HOST

MARGIN = LookaheadMargin.on(DEFAULT_HOST)


@pytest.mark.parametrize(
    ("predicted_time", "num_steps", "num_requests", "delay"),
    [
        (0.1, 1, 3, 0.1 - MARGIN.batch - 3 * MARGIN.request),
        (0.1, 1, 1, 0.1 - MARGIN.batch - MARGIN.request),
        (1e-3, 1, 3, 0.0),
        (0.1, 2, 3, None),
        (None, 1, 3, None),
    ],
)
def test_an_end_is_predicted_as_long_before_as_it_takes_to_plan_the_next_batch(
    predicted_time: float | None, num_steps: int, num_requests: int, delay: float | None
) -> None:
    batch = prefill([waiting(f"r{number}", 4) for number in range(num_requests)], (0,))
    plan = replace(batch, predicted_time=predicted_time, num_steps=num_steps)
    assert MARGIN.delay(plan) == (delay if delay is None else pytest.approx(delay))


@pytest.mark.parametrize("planning", [0.0, 1e-3, 0.01, 1.0])
def test_the_margin_has_room_for_plans_that_take_long(planning: float) -> None:
    plan = replace(prefill([waiting("r0", 4)], (0,)), predicted_time=0.1)
    usual, delay = MARGIN.delay(plan), MARGIN.delay(plan, planning)
    assert usual is not None
    assert delay == pytest.approx(max(0.0, min(usual, 0.1 - planning - SENDING_SHARE * MARGIN.batch)))


def times_of(seconds: Iterable[float]) -> PlanningTimes:
    times = PlanningTimes()
    for number, taken in enumerate(seconds):
        times.begin(float(number))
        times.take(number + taken)
    return times


def test_plans_are_as_slow_as_nearly_all_of_the_last_ones() -> None:
    assert times_of([]).slow == 0.0
    assert times_of([0.25]).slow == 0.25
    assert times_of([*[0.25] * 31, 0.5]).slow == 0.25
    assert times_of([*[0.25] * 8, *[0.5] * 8]).slow == 0.5
    assert times_of([*[0.5] * 100, *[0.125] * NUM_PLANS]).slow == 0.125


def test_only_what_is_planned_for_a_predicted_end_counts() -> None:
    times = PlanningTimes()
    times.take(1.0)
    times.begin(2.0)
    times.end()
    times.take(9.0)
    assert times.slow == 0.0
    times.begin(10.0)
    times.begin(10.25)
    times.take(10.5)
    times.take(19.0)
    assert times.slow == 0.5
