"""From records to numbers: latencies, throughput, goodput and attainment, as a whole and by length."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import numpy as np

from loong.workloads.metrics.prefix_hits import ideal_hits
from loong.workloads.metrics.record import RequestRecord
from loong.workloads.metrics.slo import Judged, LimitsOf, SLORule

STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
BUCKET_EDGES = (0, 4_096, 32_768, 131_072, math.inf)
BUCKET_NAMES = ("< 4k", "4-32k", "32-128k", "> 128k")
MIN_CLASS_REQUESTS = 20  # of a class of prompt length that is judged by itself: fewer say little about 90 %

Distribution: TypeAlias = Mapping[str, float]
"""Each of `STATISTICS` of some samples, in their unit."""


def distribution_of(samples: Iterable[float]) -> Distribution | None:
    """Summarize the samples (percentiles interpolate linearly); None if there are none."""
    values = np.fromiter(samples, dtype=np.float64)
    if values.size == 0:
        return None
    p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
    statistics = (float(values.mean()), p50, float(values.std()), p90, p95, p99)
    return dict(zip(STATISTICS, statistics, strict=True))


@dataclass(frozen=True, slots=True)
class Latencies:
    """Distributions over completed requests, in seconds; None where there is no sample.

    The normalized ones are LoongServe's per-token, input and output latency.
    """

    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2el: Distribution | None
    normalized: Distribution | None
    normalized_input: Distribution | None
    normalized_output: Distribution | None

    @staticmethod
    def of(completed: Sequence[RequestRecord]) -> "Latencies":
        """Summarize requests that all completed; ITL pools the gaps of all of them."""
        return Latencies(
            ttft=distribution_of(r.ttft for r in completed),
            tpot=distribution_of(r.tpot for r in completed if r.tpot is not None),
            itl=distribution_of(gap for r in completed for gap in r.itls),
            e2el=distribution_of(r.e2el for r in completed),
            normalized=distribution_of(r.normalized for r in completed),
            normalized_input=distribution_of(r.normalized_input for r in completed),
            normalized_output=distribution_of(r.normalized_output for r in completed),
        )

    def by_name(self) -> dict[str, Distribution | None]:
        """Return the distributions by their names, as they stand in vLLM's keys where it has them."""
        return {
            "ttft": self.ttft,
            "tpot": self.tpot,
            "itl": self.itl,
            "e2el": self.e2el,
            "normalized": self.normalized,
            "normalized_input": self.normalized_input,
            "normalized_output": self.normalized_output,
        }


@dataclass(frozen=True, slots=True)
class BucketMetrics:
    """The requests whose prompts, as sent, have a length in one range."""

    name: str
    num_sent: int
    num_attained: int | None
    latencies: Latencies

    @property
    def attainment(self) -> float | None:
        """Return the fraction of sent requests that met the SLO."""
        return None if self.num_attained is None or not self.num_sent else self.num_attained / self.num_sent


@dataclass(frozen=True, slots=True)
class Metrics:
    """One run. Token counts are of completed requests; the duration ends with the last request.

    `num_attained` is None if no SLO was given. The `num_requested_*` totals are over all sent requests.
    `num_cached_tokens` is None if no answer says how many tokens of its prompt were in the prefix cache.
    `num_ideal_cached_tokens` is described at `prefix_hits`.
    """

    duration: float
    num_sent: int
    num_completed: int
    num_attained: int | None
    num_requested_input_tokens: int
    num_requested_output_tokens: int
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    num_ideal_cached_tokens: int
    num_without_usage: int
    latencies: Latencies
    lateness: Distribution | None
    buckets: tuple[BucketMetrics, ...]

    @property
    def num_failed(self) -> int:
        """Return the number of requests that were sent and did not complete."""
        return self.num_sent - self.num_completed

    @property
    def request_throughput(self) -> float:
        """Return the completed requests per second."""
        return self._per_second(self.num_completed)

    @property
    def output_throughput(self) -> float:
        """Return the output tokens per second."""
        return self._per_second(self.num_output_tokens)

    @property
    def total_token_throughput(self) -> float:
        """Return the prompt and output tokens per second."""
        return self._per_second(self.num_input_tokens + self.num_output_tokens)

    @property
    def request_goodput(self) -> float | None:
        """Return the requests per second that met the SLO."""
        return None if self.num_attained is None else self._per_second(self.num_attained)

    @property
    def attainment(self) -> float | None:
        """Return the fraction of all sent requests that met the SLO; a failed request is a miss."""
        return None if self.num_attained is None or not self.num_sent else self.num_attained / self.num_sent

    @property
    def hit_rate(self) -> float | None:
        """Return the fraction of input tokens that were in the prefix cache."""
        return None if self.num_cached_tokens is None else self._of_input(self.num_cached_tokens)

    @property
    def ideal_hit_rate(self) -> float | None:
        """Return the fraction of input tokens that a prefix cache without a limit would have had."""
        return self._of_input(self.num_ideal_cached_tokens)

    def _of_input(self, num_tokens: int) -> float | None:
        return num_tokens / self.num_input_tokens if self.num_input_tokens else None

    def _per_second(self, count: int) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def compute_metrics(
    records: Sequence[RequestRecord], limits_of: LimitsOf | None, *, length_scale: float = 1.0
) -> Metrics:
    """Summarize a run; `length_scale` multiplies the edges of the length buckets as it did the lengths."""
    completed = [r for r in records if r.is_completed]
    reported = [r.num_cached_tokens for r in completed if r.num_cached_tokens is not None]
    ideal = zip(records, ideal_hits(records), strict=True)
    return Metrics(
        duration=max((r.finish_time for r in records), default=0.0),
        num_sent=len(records),
        num_completed=len(completed),
        num_attained=count_attained(records, limits_of),
        num_requested_input_tokens=sum(r.request.num_prompt_tokens for r in records),
        num_requested_output_tokens=sum(r.request.num_output_tokens for r in records),
        num_input_tokens=sum(r.num_prompt_tokens for r in completed),
        num_output_tokens=sum(r.num_output_tokens for r in completed),
        num_cached_tokens=sum(reported) if reported else None,
        num_ideal_cached_tokens=sum(hits for r, hits in ideal if r.is_completed),
        num_without_usage=sum(r.usage is None for r in completed),
        latencies=Latencies.of(completed),
        lateness=distribution_of(r.lateness for r in records),
        buckets=_buckets(records, limits_of, length_scale),
    )


def slo_ratio(record: RequestRecord, limits_of: LimitsOf) -> float:
    """Return the scale of the bounds at which a request just meets them; infinity if it did not complete."""
    return limits_of(record.request.num_prompt_tokens).ratio(record)


def is_attained(record: RequestRecord, limits_of: LimitsOf) -> bool:
    """Return whether the request completed within its bounds."""
    return slo_ratio(record, limits_of) <= 1.0


def run_attains(metrics: Metrics, rule: SLORule, goal: float) -> bool:
    """Return whether the share `goal` of requests met the rule, or their means did and none failed."""
    match rule.judged:
        case Judged.EACH:
            return (metrics.attainment or 0.0) >= goal
        case Judged.MEAN:
            return metrics.num_failed == 0 and _means_are_met(metrics.latencies, rule)
        case _:
            assert_never(rule.judged)


def every_class_attains(metrics: Metrics, goal: float) -> bool:
    """Return whether the share `goal` of every judged class of prompt length met the rule.

    A class of fewer than `MIN_CLASS_REQUESTS` requests is not judged. If no class is judged, the result is
    false.
    """
    judged = [bucket for bucket in metrics.buckets if bucket.num_sent >= MIN_CLASS_REQUESTS]
    return bool(judged) and all((bucket.attainment or 0.0) >= goal for bucket in judged)


def class_edges(length_scale: float) -> tuple[float, ...]:
    """Return the prompt lengths at which the second and each later class begins, where lengths are scaled."""
    return tuple(edge * length_scale for edge in BUCKET_EDGES[1:-1])


def _means_are_met(latencies: Latencies, rule: SLORule) -> bool:
    limits = rule.limits(0)
    bounds = {
        "normalized": limits.normalized,
        "normalized_input": limits.normalized_input,
        "normalized_output": limits.normalized_output,
    }
    by_name = latencies.by_name()
    return all(
        distribution is not None and distribution["mean"] <= bounds[name]
        for name, distribution in by_name.items()
        if name in bounds
    )


def count_attained(records: Iterable[RequestRecord], limits_of: LimitsOf | None) -> int | None:
    """Return how many requests completed within their bounds, None if there are no bounds."""
    return None if limits_of is None else sum(is_attained(r, limits_of) for r in records)


def _buckets(
    records: Sequence[RequestRecord], limits_of: LimitsOf | None, length_scale: float
) -> tuple[BucketMetrics, ...]:
    buckets = []
    for name, low, high in zip(BUCKET_NAMES, BUCKET_EDGES[:-1], BUCKET_EDGES[1:], strict=True):
        inside = [
            r for r in records if low * length_scale <= r.request.num_prompt_tokens < high * length_scale
        ]
        buckets.append(
            BucketMetrics(
                name=name,
                num_sent=len(inside),
                num_attained=count_attained(inside, limits_of),
                latencies=Latencies.of([r for r in inside if r.is_completed]),
            )
        )
    return tuple(buckets)
