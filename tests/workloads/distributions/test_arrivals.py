import math
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.distributions.arrivals import arrival_times


def gaps(
    rate: float, burstiness: float, num_requests: int = 20_000
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.diff(times(rate, burstiness, num_requests))


def times(rate: float, burstiness: float, num_requests: int) -> list[float]:
    return list(islice(arrival_times(np.random.default_rng(0), rate, burstiness), num_requests))


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_asked_for(burstiness: float) -> None:
    sample = gaps(rate=5.0, burstiness=burstiness)
    assert sample.mean() == pytest.approx(1 / 5, rel=0.05)
    assert sample.std() / sample.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_infinite_burstiness_is_a_constant_pace() -> None:
    assert gaps(rate=4.0, burstiness=math.inf) == pytest.approx(0.25)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert times(math.inf, 1.0, 3) == [0.0, 0.0, 0.0]


@given(
    num_requests=st.integers(0, 50),
    rate=st.floats(0.01, 1000) | st.just(math.inf),
    burstiness=st.floats(0.1, 10) | st.just(math.inf),
)
def test_arrivals_start_at_zero_and_never_descend(num_requests: int, rate: float, burstiness: float) -> None:
    drawn = times(rate, burstiness, num_requests)
    assert len(drawn) == num_requests
    assert drawn == sorted(drawn)
    assert all(time == 0.0 for time in drawn[:1])
