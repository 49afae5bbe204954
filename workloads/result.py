"""A run as JSON, under the keys of `vllm bench serve`, so that what plots its results plots these."""

from collections.abc import Sequence
from typing import TypeAlias

from loong.workloads.metrics import STATISTICS, Latencies, Metrics
from loong.workloads.record import RequestRecord

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | dict[str, JSON] | None"


def result_json(metrics: Metrics, records: Sequence[RequestRecord]) -> dict[str, JSON]:
    """Return one run: `metrics_json`, and a row of each request.

    Lists hold one entry a request, in the order of arrival; times in seconds, null where there is none.
    """
    return {
        **metrics_json(metrics),
        "input_lens": [r.num_prompt_tokens for r in records],
        "output_lens": [r.num_output_tokens for r in records],
        "start_times": [r.sent_time for r in records],
        "ttfts": [r.ttft if r.is_completed else None for r in records],
        "e2els": [r.e2el if r.is_completed else None for r in records],
        "errors": [r.error or "" for r in records],
    }


def metrics_json(metrics: Metrics) -> dict[str, JSON]:
    """Return totals, latencies in ms, and the same by length of prompt. What has no samples is null."""
    return {
        "duration": metrics.duration,
        "num_prompts": metrics.num_sent,
        "completed": metrics.num_completed,
        "failed": metrics.num_failed,
        "total_input_tokens": metrics.num_input_tokens,
        "total_output_tokens": metrics.num_output_tokens,
        "requested_input_tokens": metrics.num_requested_input_tokens,
        "requested_output_tokens": metrics.num_requested_output_tokens,
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


def _latencies(latencies: Latencies) -> dict[str, JSON]:
    return {
        f"{statistic}_{name}_ms": None if distribution is None else distribution[statistic] * 1e3
        for name, distribution in latencies.by_name().items()
        for statistic in STATISTICS
    }
