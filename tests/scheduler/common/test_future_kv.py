from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots import waiting

from loong.core.request import RequestView
from loong.scheduler.common.future_kv import (
    FutureKV,
    allocation_cost,
    allocation_gain,
    dispatch_cost,
    dispatch_gain,
    paper_weight,
)
from loong.scheduler.common.request_lengths import Lengths

NUM_REMAINING, NUM_CURRENT = st.integers(0, 40), st.integers(0, 1000)
REQUEST = st.tuples(NUM_REMAINING, NUM_CURRENT)
REQUESTS = st.lists(REQUEST, max_size=12)


def view(num_remaining: int, num_current: int) -> RequestView:
    """Return a request with these tokens to come, and these slots needed before."""
    return waiting("r", num_current + 1, num_remaining)


def future_of(requests: list[tuple[int, int]]) -> FutureKV:
    return FutureKV.of(Lengths.of([view(*request) for request in requests]))


def simulated_peak(requests: list[tuple[int, int]]) -> int:
    """Return the most slots in use while all decode, a token a step, and leave after their last."""
    num_steps = max((remaining for remaining, _ in requests), default=0)
    return max(
        sum(current + step for remaining, current in requests if step <= remaining)
        for step in range(num_steps + 1)
    )


def test_a_decode_batch_pays_for_the_prefill_it_waits_for_by_the_output_it_has() -> None:
    assert dispatch_cost(6.0, [2, 3, 60]) == pytest.approx(3.0 + 2.0 + 0.1)
    assert dispatch_cost(6.0, []) == 0.0


def test_prompts_gain_what_the_newest_of_a_decode_batch_has_still_to_decode() -> None:
    assert dispatch_gain(10.0, [9.0, 4.0, 30.0], [100, 200]) == pytest.approx(6 / 100 + 6 / 200)
    assert dispatch_gain(10.0, [11.0, 30.0], [100, 200]) == 0.0


def test_prompts_gain_the_seconds_that_one_more_instance_saves() -> None:
    assert allocation_gain(5.0, 3.0, [100, 50]) == pytest.approx(2 / 100 + 2 / 50)
    assert allocation_gain(3.0, 5.0, [100, 50]) < 0


def test_prompts_pay_the_seconds_until_an_instance_is_empty() -> None:
    assert allocation_cost(0.5, [100, 50]) == pytest.approx(0.5 / 100 + 0.5 / 50)


@given(st.lists(st.integers(1, 10**6), min_size=1), st.integers(0, 999), st.integers(0, 999))
def test_gain_exceeds_cost_just_when_the_seconds_saved_exceed_those_waited(
    num_input_tokens: list[int], saved: int, waited: int
) -> None:
    gain = allocation_gain(saved, 0.0, num_input_tokens)
    assert (gain > allocation_cost(waited, num_input_tokens)) == (saved > waited)


def test_a_prompt_twice_as_long_counts_half() -> None:
    assert paper_weight(1000) == 2 * paper_weight(2000) == 1e-3


def test_the_peak_is_where_the_equation_has_its_largest_term() -> None:
    # l_k k + sum of c_i: 9 + 10, 9 * 2 + 30, 2 * 3 + 60
    assert future_of([(9, 10), (2, 30), (9, 20)]).peak == 66
    # 50 + 10, 9 * 2 + 30
    assert future_of([(50, 10), (9, 20)]).peak == 60


@given(REQUESTS)
def test_the_peak_is_that_of_decoding_step_by_step(requests: list[tuple[int, int]]) -> None:
    assert future_of(requests).peak == simulated_peak(requests)


@given(REQUESTS, REQUESTS)
def test_adding_one_by_one_is_as_good_as_all_at_once(
    first: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    future = future_of(first)
    for request in others:
        future = future.adding(view(*request))
    together = future_of(first + others)
    assert future.remaining.tolist() == together.remaining.tolist()
    assert future.peak == together.peak


@given(REQUESTS, REQUEST, st.integers(0, 3))
def test_the_peak_with_one_more_request_is_that_once_it_is_added(
    requests: list[tuple[int, int]], request: tuple[int, int], num_siblings: int
) -> None:
    future, more = future_of(requests), replace(view(*request), num_siblings=num_siblings)
    assert future.peak_with(more) == future.adding(more).peak


@given(REQUESTS, REQUEST)
def test_adding_a_request_leaves_the_value_as_it_was(
    requests: list[tuple[int, int]], request: tuple[int, int]
) -> None:
    future = future_of(requests)
    future.adding(view(*request))
    assert future.peak == future_of(requests).peak


@given(REQUESTS, NUM_REMAINING, NUM_CURRENT, st.integers(0, 9), st.integers(0, 9))
def test_the_peak_grows_with_every_request_and_its_tokens(
    requests: list[tuple[int, int]], num_remaining: int, num_current: int, longer: int, larger: int
) -> None:
    future = future_of(requests)
    peak = future.adding(view(num_remaining, num_current)).peak
    assert peak >= future.peak
    assert future.adding(view(num_remaining + longer, num_current + larger)).peak >= peak


@given(REQUESTS)
def test_the_peak_is_never_below_what_is_in_use_nor_above_what_all_will_have_had(
    requests: list[tuple[int, int]],
) -> None:
    in_use = sum(current for _, current in requests)
    assert in_use <= future_of(requests).peak <= in_use + sum(remaining for remaining, _ in requests)
