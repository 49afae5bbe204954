import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.workloads.distributions.prefill import PrefillFit, fit_prefill, probe_lengths

LENGTHS = (100, 1_000, 10_000, 100_000)


@given(
    constant=st.floats(1e-4, 1.0),
    linear=st.floats(0, 1e-4),
    quadratic=st.floats(0, 1e-8),
)
def test_a_quadratic_is_found_again(constant: float, linear: float, quadratic: float) -> None:
    truth = PrefillFit(constant, linear, quadratic)
    fit = fit_prefill(LENGTHS, [truth(n) for n in LENGTHS])
    for n in (*LENGTHS, 30_000):
        assert fit(n) == pytest.approx(truth(n), rel=1e-3)


@given(seconds=st.lists(st.floats(1e-4, 100), min_size=4, max_size=4))
def test_no_coefficient_is_negative_whatever_was_measured(seconds: list[float]) -> None:
    fit = fit_prefill(LENGTHS, seconds)
    assert min(fit.constant, fit.linear, fit.quadratic) >= 0
    assert fit(50_000) >= fit(5_000) > 0


def test_one_length_is_enough_for_a_formula() -> None:
    assert fit_prefill([64], [0.5])(64) == pytest.approx(0.5)


def test_probes_span_the_workload() -> None:
    assert probe_lengths(10, 10_000) == [10, 100, 1_000, 10_000]
    assert probe_lengths(7, 7) == [7]
