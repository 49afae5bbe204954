import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from loong.workloads.metrics.metrics import (
    BUCKET_EDGES,
    compute_metrics,
    count_attained,
    distribution_of,
    run_attains,
)
from loong.workloads.metrics.record import RequestRecord, TokenUsage
from loong.workloads.metrics.slo import SLOLimits, parse_slo
from loong.workloads.request import RequestShape, TokenRun, WorkloadRequest

EASY = SLOLimits(ttft=math.inf, tpot=math.inf, e2el=math.inf)


def make_record(
    token_times: tuple[float, ...] = (1.0, 1.5, 2.0),
    *,
    sent_time: float = 0.0,
    num_prompt_tokens: int = 100,
    error: str | None = None,
) -> RequestRecord:
    shape = RequestShape((TokenRun(0, num_prompt_tokens),), len(token_times))
    return RequestRecord(
        request=WorkloadRequest(sent_time, shape),
        due_time=sent_time,
        sent_time=sent_time,
        token_times=token_times,
        finish_time=max((*token_times, sent_time)),
        usage=TokenUsage(num_prompt_tokens, len(token_times)),
        error=error,
    )


@st.composite
def record_lists(draw: st.DrawFn) -> list[RequestRecord]:
    records = []
    for _ in range(draw(st.integers(1, 12))):
        sent_time = draw(st.floats(0, 100))
        gaps = draw(st.lists(st.floats(0.001, 10), min_size=1, max_size=6))
        times = tuple(sent_time + sum(gaps[: i + 1]) for i in range(len(gaps)))
        records.append(
            make_record(
                times,
                sent_time=sent_time,
                num_prompt_tokens=draw(st.integers(1, 500_000)),
                error=draw(st.none() | st.just("lost")),
            )
        )
    return records


def test_one_request_gives_the_numbers_of_its_definition() -> None:
    record = make_record((3.0, 3.5, 5.0), sent_time=2.0, num_prompt_tokens=10)
    latencies = compute_metrics([record], None).latencies
    means = {name: d["mean"] for name, d in latencies.by_name().items() if d is not None}
    assert means == pytest.approx(
        {
            "ttft": 1.0,
            "tpot": 1.0,
            "itl": 1.0,
            "e2el": 3.0,
            "normalized": 3 / 13,
            "normalized_input": 0.1,
            "normalized_output": 2 / 3,
        }
    )


def test_tpot_counts_the_servers_tokens_and_not_the_pieces_of_the_stream() -> None:
    record = replace(make_record((1.0, 2.0, 3.0)), usage=TokenUsage(100, 9))
    assert record.tpot == pytest.approx(2 / 8)


def test_an_answer_of_one_token_has_a_ttft_and_no_tpot() -> None:
    metrics = compute_metrics([make_record((1.0,))], lambda n: EASY)
    assert metrics.latencies.ttft is not None
    assert metrics.latencies.tpot is None
    assert metrics.attainment == 1.0


def test_throughputs_are_per_second_until_the_last_request_ends() -> None:
    metrics = compute_metrics([make_record((1.0, 2.0)), make_record((1.0, 4.0))], lambda n: EASY)
    assert metrics.duration == 4.0
    assert metrics.request_throughput == 0.5
    assert metrics.output_throughput == 1.0
    assert metrics.total_token_throughput == 51.0
    assert metrics.request_goodput == 0.5


@given(records=record_lists())
def test_percentiles_ascend_and_stay_between_the_extremes(records: list[RequestRecord]) -> None:
    ttfts = [r.ttft for r in records if r.is_completed]
    assume(ttfts)
    ttft = compute_metrics(records, None).latencies.ttft
    assert ttft is not None
    ordered = [min(ttfts), ttft["median"], ttft["p90"], ttft["p95"], ttft["p99"], max(ttfts)]
    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(ordered))


@given(records=record_lists())
def test_a_failed_request_is_a_miss_under_any_bounds(records: list[RequestRecord]) -> None:
    metrics = compute_metrics(records, lambda n: EASY)
    assert metrics.num_attained == metrics.num_completed == sum(r.error is None for r in records)
    assert metrics.attainment == metrics.num_completed / len(records)


@given(records=record_lists(), tight=st.floats(0.001, 20), looser=st.floats(1, 10))
def test_looser_bounds_are_met_at_least_as_often(
    records: list[RequestRecord], tight: float, looser: float
) -> None:
    def attained(bound: float) -> int:
        return count_attained(records, lambda n: SLOLimits(bound, bound, bound)) or 0

    assert attained(tight) <= attained(tight * looser) <= sum(r.is_completed for r in records)


@given(records=record_lists(), factor=st.floats(0.1, 10))
def test_a_clock_at_another_pace_scales_every_time(records: list[RequestRecord], factor: float) -> None:
    scaled = [
        replace(
            r,
            due_time=r.due_time * factor,
            sent_time=r.sent_time * factor,
            finish_time=r.finish_time * factor,
            token_times=tuple(time * factor for time in r.token_times),
        )
        for r in records
    ]
    before, after = compute_metrics(records, None), compute_metrics(scaled, None)
    assert after.duration == pytest.approx(before.duration * factor)
    assert after.request_throughput == pytest.approx(before.request_throughput / factor)
    for old, new in zip(before.latencies.by_name().values(), after.latencies.by_name().values(), strict=True):
        assert (old is None) == (new is None)
        if old is not None and new is not None:
            assert new["mean"] == pytest.approx(old["mean"] * factor)
            assert new["p99"] == pytest.approx(old["p99"] * factor)


@given(records=record_lists())
def test_every_request_is_in_one_bucket(records: list[RequestRecord]) -> None:
    metrics = compute_metrics(records, lambda n: EASY)
    assert sum(b.num_sent for b in metrics.buckets) == metrics.num_sent
    assert sum(b.num_attained or 0 for b in metrics.buckets) == metrics.num_attained


@pytest.mark.parametrize("length_scale", [1.0, 1 / 64])
def test_bucket_edges_shrink_with_the_lengths(length_scale: float) -> None:
    at_edges = [int(edge * length_scale) for edge in BUCKET_EDGES[1:-1]]
    lengths = [length for edge in at_edges for length in (edge - 1, edge)]
    metrics = compute_metrics(
        [make_record(num_prompt_tokens=n) for n in lengths], None, length_scale=length_scale
    )
    assert [bucket.num_sent for bucket in metrics.buckets] == [1, 2, 2, 1]


def test_a_run_without_bounds_has_neither_goodput_nor_attainment() -> None:
    metrics = compute_metrics([make_record()], None)
    assert metrics.request_goodput is None
    assert metrics.attainment is None


def test_nothing_completed_has_no_latencies_and_no_throughput() -> None:
    metrics = compute_metrics([make_record((), error="refused")], lambda n: EASY)
    assert set(metrics.latencies.by_name().values()) == {None}
    assert metrics.request_throughput == 0.0
    assert metrics.attainment == 0.0


def test_no_samples_have_no_distribution() -> None:
    assert distribution_of([]) is None


def test_only_completed_requests_without_usage_are_counted_as_such() -> None:
    records = [replace(make_record(), usage=None), replace(make_record(error="x"), usage=None), make_record()]
    assert compute_metrics(records, None).num_without_usage == 1


@given(records=record_lists())
def test_numbers_are_those_of_vllms_definitions(records: list[RequestRecord]) -> None:
    """Written down anew: TPOT over output length less 1, gaps pooled, percentiles linear."""
    outputs = [(r, [t - r.sent_time for t in r.token_times]) for r in records if r.error is None]
    assume(outputs)
    ttfts = [times[0] for _, times in outputs]
    e2els = [times[-1] for _, times in outputs]
    tpots = [(times[-1] - times[0]) / (len(times) - 1) for _, times in outputs if len(times) > 1]
    itls = [later - earlier for _, times in outputs for earlier, later in itertools.pairwise(times)]
    duration = max(r.finish_time for r in records)
    bound = float(np.median(ttfts))
    num_good = sum(ttft <= bound for ttft in ttfts)

    metrics = compute_metrics(records, lambda n: replace(EASY, ttft=bound))
    assert metrics.request_throughput == pytest.approx(len(outputs) / duration)
    assert metrics.output_throughput == pytest.approx(sum(len(times) for _, times in outputs) / duration)
    assert metrics.request_goodput == pytest.approx(num_good / duration)
    assert metrics.attainment == pytest.approx(num_good / len(records))
    named = metrics.latencies.by_name()
    for name, samples in (("ttft", ttfts), ("tpot", tpots), ("itl", itls), ("e2el", e2els)):
        found = named[name]
        assert (found is None) == (not samples)
        if found is not None:
            assert found["mean"] == pytest.approx(np.mean(samples))
            assert found["median"] == pytest.approx(np.median(samples))
            assert found["std"] == pytest.approx(np.std(samples), abs=1e-9)
            assert found["p99"] == pytest.approx(np.percentile(samples, 99))


def test_a_run_attains_by_the_share_of_all_that_were_sent() -> None:
    records = [make_record() for _ in range(9)] + [make_record(error="lost")]
    metrics = compute_metrics(records, lambda n: EASY)
    rule = parse_slo("ttft:60000")
    assert run_attains(metrics, rule, goal=0.9)
    assert not run_attains(metrics, rule, goal=0.91)


def test_a_rule_about_means_judges_the_run_and_forgives_no_failure() -> None:
    rule = parse_slo("loongserve-10-mixed")  # 70 ms a token, 90 a prompt token, 360 an output token
    limits_of = rule.limits_of(None)
    quick = make_record((1.0, 1.1, 1.2), num_prompt_tokens=100)
    slow = make_record((14.0, 14.1, 14.2), num_prompt_tokens=100)  # 138 ms a token

    def attains(*records: RequestRecord) -> bool:
        return run_attains(compute_metrics(records, limits_of), rule, goal=0.9)

    assert attains(quick, slow, quick)
    assert not attains(quick, slow, slow)
    assert not attains(quick, replace(quick, error="lost"))
    assert not attains(replace(quick, error="lost"))
    assert count_attained([quick, slow], limits_of) == 1
