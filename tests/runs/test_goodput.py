"""The search for the highest rate that attains, on attempts that cost nothing."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.runs.goodput import MAX_DOUBLINGS, Goodput, of_sweep, search
from loong.workloads.metrics.slo import parse_slo

RULE = parse_slo("tight")


@dataclass(frozen=True, slots=True)
class Attempt:
    """It attains up to some rate."""

    rate: float
    highest: float

    @property
    def attains(self) -> bool:
        return self.rate <= self.highest


def found(highest: float, first_rate: float, precision: float = 0.1) -> Goodput[Attempt]:
    return search("esp", RULE, lambda rate: Attempt(rate, highest), first_rate, precision)


@given(highest=st.floats(0.1, 100), offset=st.integers(-10, 10), precision=st.floats(0.01, 1.0))
def test_the_goodput_is_as_near_as_was_asked_for_wherever_the_search_begins(
    highest: float, offset: int, precision: float
) -> None:
    goodput = found(highest, highest * 2.0**offset * 0.77, precision)
    assert goodput.best is not None
    assert goodput.too_high_rate is not None
    assert goodput.rate <= highest < goodput.too_high_rate
    assert goodput.too_high_rate <= goodput.rate * (1 + precision) * (1 + 1e-9)
    rates = [attempt.rate for attempt in goodput.points]
    assert rates == sorted(set(rates))


@pytest.mark.parametrize("first_rate", [1.0, 1e9])
def test_what_is_out_of_reach_is_reported_as_a_bound(first_rate: float) -> None:
    never = found(0.0, first_rate)
    assert (never.best, never.rate, len(never.points)) == (None, 0.0, MAX_DOUBLINGS + 1)
    assert never.too_high_rate == first_rate / 2**MAX_DOUBLINGS
    always = found(float("inf"), first_rate)
    assert (always.rate, always.too_high_rate) == (first_rate * 2**MAX_DOUBLINGS, None)


def test_a_sweep_counts_up_to_the_first_rate_that_misses() -> None:
    points = [Attempt(1.0, 2.0), Attempt(3.0, 2.0), Attempt(4.0, 9.0)]
    goodput = of_sweep("esp", RULE, points)
    assert (goodput.rate, goodput.too_high_rate) == (1.0, 3.0)
    assert of_sweep("esp", RULE, points[1:]).best is None
