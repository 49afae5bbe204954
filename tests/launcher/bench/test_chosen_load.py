from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from loong.launcher.bench.chosen_load import (
    DEFAULT_NUM_REQUESTS,
    RUN_SECONDS,
    SMALLEST_SCALE,
    Auto,
    Served,
    choose_load,
)
from loong.launcher.bench.config import BenchLoadConfig, longest_of
from loong.workloads.request import RequestShape

ALL = Auto(length_scale=True, request_rate=True, num_requests=True)
LOAD = BenchLoadConfig(
    workload="mixed",
    num_requests=20,
    duration=None,
    rates=(1.0,),
    burstiness=1.0,
    max_concurrency=None,
    seed=3,
    length_scale=1.0,
    output_scale=None,
    num_warmups=0,
    vocab_size=256,
    request_timeout=60.0,
)


def served(max_tokens: int | None, tokens_per_second: float) -> Served:
    """Return a server whose time goes by the number of tokens alone."""

    def capacity(shapes: Sequence[RequestShape]) -> float:
        tokens = sum(sum(run.num_tokens for run in shape.prompt) for shape in shapes)
        return len(shapes) * tokens_per_second / tokens

    return Served(max_tokens, capacity, "the test says")


def longest_at(load: BenchLoadConfig, repeats: int) -> int:
    return max(longest_of(load.requests(max(load.rates), repeat)) for repeat in range(repeats))


@pytest.mark.parametrize("tokens_per_second", [1e4, 1e6])
@pytest.mark.parametrize("max_tokens", [None, 1000, 40_000, 10**9])
def test_the_scale_is_the_largest_by_which_all_fits_and_a_run_takes_a_minute(
    max_tokens: int | None, tokens_per_second: float
) -> None:
    server = served(max_tokens, tokens_per_second)
    load, (line,) = choose_load(LOAD, ALL, server, num_repeats=2)
    scale = Fraction(load.length_scale)
    assert f"--length-scale {scale}, " in line
    assert f"--request-rate {load.rates[0]:g}, " in line
    assert f"--num-requests {load.num_requests}" in line
    assert load.num_requests is not None
    assert load.num_requests / load.rates[0] == pytest.approx(RUN_SECONDS, rel=0.1) or load.num_requests in (
        20,
        2000,
    )
    if scale > SMALLEST_SCALE:
        assert longest_at(load, 2) <= (max_tokens or 8192)
        assert load.num_requests >= 190
    if scale < 1:
        twice, _ = choose_load(
            replace(LOAD, length_scale=load.length_scale * 2), replace(ALL, length_scale=False), server, 2
        )
        assert longest_at(twice, 2) > (max_tokens or 8192) or twice.rates[0] * RUN_SECONDS < 200


def test_lengths_leave_room_for_the_rate_that_is_asked_for() -> None:
    server, auto = served(10**9, 1e6), replace(ALL, request_rate=False)
    slow, _ = choose_load(replace(LOAD, rates=(1.0, 2.0)), auto, server, 1)
    fast, _ = choose_load(replace(LOAD, rates=(200.0,)), auto, server, 1)
    assert slow.rates == (1.0, 2.0)
    assert slow.num_requests == fast.num_requests == DEFAULT_NUM_REQUESTS
    assert fast.length_scale < slow.length_scale


def test_what_is_given_stays_and_nothing_is_said_of_it() -> None:
    assert choose_load(LOAD, Auto(), served(1, 1.0), 1) == (LOAD, ())
    load, (line,) = choose_load(
        replace(LOAD, length_scale=1 / 64), replace(ALL, length_scale=False), served(None, 1e6), 1
    )
    assert load.length_scale == 1 / 64
    assert "--length-scale" not in line


def test_a_server_that_does_not_say_what_it_takes_is_assumed_to_take_little() -> None:
    load, (line,) = choose_load(LOAD, ALL, served(None, 1e6), 1)
    assert longest_at(load, 1) <= 8192
    assert "8,192 tokens (assumed: the server does not say what it takes)" in line


@pytest.mark.parametrize("is_scale_chosen", [False, True])
def test_what_is_measured_for_the_rate_is_measured_once_and_decides_it(is_scale_chosen: bool) -> None:
    measured: list[int] = []

    def rate_capacity(shapes: Sequence[RequestShape]) -> float:
        measured.append(len(shapes))
        return 30.0

    def capacity(_: Sequence[RequestShape]) -> float:
        assert is_scale_chosen, "only the choice of a scale needs it"
        return 300.0

    server = Served(10**9, capacity, "the test says", rate_capacity)
    load, (line,) = choose_load(LOAD, replace(ALL, length_scale=is_scale_chosen), server, 1)
    assert load.rates == (20.0,)
    assert "two thirds of the 30 req/s that the test says" in line
    assert len(measured) == 1
