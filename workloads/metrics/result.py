"""A run as JSON, under the keys of `vllm bench serve`, so that plotting tools for its results work."""

from collections.abc import Sequence
from math import isfinite
from typing import TypeAlias

from loong.workloads.metrics.backlog import Backlog
from loong.workloads.metrics.metrics import STATISTICS, Latencies, Metrics, slo_ratio
from loong.workloads.metrics.record import RequestRecord
from loong.workloads.metrics.slo import LimitsOf

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | dict[str, JSON] | None"

SECONDS_DIGITS = 6
RATIO_DIGITS = 4
WORK_DIGITS = 4  # of device seconds, behind the point


def columns_json(records: Sequence[RequestRecord], limits_of: LimitsOf | None) -> dict[str, JSON]:
    """Return lists with an entry a request, in order of arrival; times in seconds, null if it has none."""
    ratios = [None if limits_of is None else slo_ratio(r, limits_of) for r in records]
    targets = [None if limits_of is None else limits_of(r.request.num_prompt_tokens).ttft for r in records]
    return {
        "request_ids": [r.request_id for r in records],
        "arrival_times": [_seconds(r.due_time) for r in records],
        "start_times": [_seconds(r.sent_time) for r in records],
        "input_lens": [r.num_prompt_tokens for r in records],
        "output_lens": [r.num_output_tokens for r in records],
        "cached_tokens": [r.num_cached_tokens for r in records],
        "requested_input_lens": [r.request.num_prompt_tokens for r in records],
        "requested_output_lens": [r.request.num_output_tokens for r in records],
        "ttfts": [_seconds(r.ttft) if r.is_completed else None for r in records],
        "tpots": [_seconds(r.tpot) if r.is_completed else None for r in records],
        "e2els": [_seconds(r.e2el) if r.is_completed else None for r in records],
        "slo_ratios": [None if x is None or not isfinite(x) else round(x, RATIO_DIGITS) for x in ratios],
        "ttft_targets": [None if x is None or not isfinite(x) else _seconds(x) for x in targets],
        "errors": [r.error or "" for r in records],
    }


def metrics_json(metrics: Metrics) -> dict[str, JSON]:
    """Return totals, latencies in ms, and the same by length of prompt. A number without samples is null."""
    return {
        "duration": metrics.duration,
        "num_prompts": metrics.num_sent,
        "completed": metrics.num_completed,
        "failed": metrics.num_failed,
        "total_input_tokens": metrics.num_input_tokens,
        "total_output_tokens": metrics.num_output_tokens,
        "requested_input_tokens": metrics.num_requested_input_tokens,
        "requested_output_tokens": metrics.num_requested_output_tokens,
        "total_cached_tokens": metrics.num_cached_tokens,
        "ideal_cached_tokens": metrics.num_ideal_cached_tokens,
        "prefix_hit_rate": metrics.hit_rate,
        "ideal_prefix_hit_rate": metrics.ideal_hit_rate,
        "request_throughput": metrics.request_throughput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "request_goodput": metrics.request_goodput,
        "slo_attainment": metrics.attainment,
        **_latencies(metrics.latencies),
        "p99_generator_lateness_ms": None if metrics.lateness is None else metrics.lateness["p99"] * 1e3,
        "by_prompt_length": [
            {
                "bucket": bucket.name,
                "sent": bucket.num_sent,
                "slo_attainment": bucket.attainment,
                **_latencies(bucket.latencies),
            }
            for bucket in metrics.buckets
        ],
    }


def backlog_json(backlog: Backlog) -> dict[str, JSON]:
    """Return the backlog over time, and the numbers that `is_stable` compares."""
    return {
        "times": [round(time, WORK_DIGITS) for time in backlog.times],
        "device_seconds": [round(work, WORK_DIGITS) for work in backlog.device_seconds],
        "at_half": backlog.at_half,
        "at_end": backlog.at_end,
        "allowance": backlog.allowance,
    }


def _latencies(latencies: Latencies) -> dict[str, JSON]:
    return {
        f"{statistic}_{name}_ms": None if distribution is None else distribution[statistic] * 1e3
        for name, distribution in latencies.by_name().items()
        for statistic in STATISTICS
    }


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, SECONDS_DIGITS)
