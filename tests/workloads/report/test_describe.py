from pathlib import Path

import numpy as np
import pytest

from loong.workloads.plots.workload import plot_workload
from loong.workloads.report.describe import Spread, describe
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest
from loong.workloads.workload import make_workload


def request(time: float, *runs: tuple[int, int], num_output: int = 11, user: str = "") -> WorkloadRequest:
    return WorkloadRequest(time, RequestShape(tuple(TokenRun(*run) for run in runs), num_output, user))


SENT = [
    request(0.0, (1, 1_000), user="a"),
    request(1.0, (2, 6_000), (3, 10), user="b"),
    request(3.0, (2, 6_000), (4, 20), num_output=21, user="a"),
    request(3.0, (5, 200_000)),
]


def test_a_spread_has_mean_deviation_ends_and_quantiles() -> None:
    spread = Spread.of(range(1, 1002))
    assert spread is not None
    assert (spread.mean, spread.min, spread.max) == (501.0, 1.0, 1001.0)
    assert spread.std == pytest.approx(np.arange(1, 1002).std())
    assert spread.quantiles == pytest.approx({"p10": 101, "p50": 501, "p90": 901, "p99": 991, "p99.9": 1000})
    assert Spread.of([]) is None


def test_requests_are_counted_with_their_users_times_and_kv() -> None:
    reported = describe(SENT)
    assert (reported.num_requests, reported.num_users, reported.duration, reported.request_rate) == (
        4,
        2,
        3.0,
        1.0,
    )
    assert reported.input.mean == (1_000 + 6_010 + 6_020 + 200_000) / 4
    assert reported.gap is not None
    assert reported.gap.mean == 1.0
    assert (reported.num_sharing, reported.num_shared_tokens) == (1, 6_000)
    assert reported.most_kv_tokens == 200_010
    assert reported.num_kv_tokens == 1_010 + 6_020 + 6_040 + 200_010
    assert reported.num_unique_kv_tokens == reported.num_kv_tokens - 6_000


def test_buckets_of_lengths_hold_every_request_and_token_once() -> None:
    reported = describe(SENT)
    assert [(b.name, b.num_requests, b.num_input_tokens) for b in reported.buckets] == [
        ("< 4k", 1, 1_000),
        ("4-32k", 2, 12_030),
        ("32-128k", 0, 0),
        ("> 128k", 1, 200_000),
    ]
    assert [b.num_shared_tokens for b in reported.buckets] == [0, 6_000, 0, 0]
    assert sum(b.num_output_tokens for b in reported.buckets) == 11 + 11 + 21 + 11


def test_the_edges_of_buckets_shrink_with_the_lengths() -> None:
    full, small = (
        describe(make_workload("mixed", 200, seed=1, length_scale=scale), length_scale=scale)
        for scale in (1.0, 1 / 64)
    )
    pairs = zip(full.buckets, small.buckets, strict=True)
    assert all(abs(one.num_requests - other.num_requests) <= 2 for one, other in pairs)


def test_one_request_has_no_gap_and_no_rate() -> None:
    reported = describe(SENT[:1])
    assert (reported.gap, reported.request_rate) == (None, None)


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_lengths_and_gaps_are_drawn(tmp_path: Path, name: str) -> None:
    plot_workload("title", make_workload("mixed@poisson(2)", 50, seed=1), tmp_path / name)
    start = (tmp_path / name).read_bytes()[:100]
    assert start.startswith(b"\x89PNG" if name == "a.png" else b"<?xml")


def test_what_comes_at_once_is_drawn_without_gaps(tmp_path: Path) -> None:
    plot_workload("title", make_workload("fixed(10)", 1, seed=1), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1_000


def test_a_constant_pace_is_drawn(tmp_path: Path) -> None:
    plot_workload("title", make_workload("fixed(10,10)@constant(2)", 9, seed=1), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1_000
