"""How long before a batch's predicted end the next one is planned."""

from dataclasses import replace

import pytest
from plans import prefill
from snapshots import waiting

from loong.executor.lookahead import LookaheadMargin
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
