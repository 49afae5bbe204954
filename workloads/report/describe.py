"""Statistics of a workload: lengths, gaps, shared prefixes and the KV they need."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loong.workloads.metrics.metrics import BUCKET_EDGES, BUCKET_NAMES
from loong.workloads.metrics.prefix_hits import prefix_hits
from loong.workloads.request import WorkloadRequest

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, standard deviation, ends and quantiles of a quantity."""

    mean: float
    std: float
    min: float
    max: float
    quantiles: dict[str, float]

    @staticmethod
    def of(samples: Iterable[float]) -> "Spread | None":
        """Return the spread of the samples (quantiles interpolate linearly); None if there are none."""
        values = np.fromiter(samples, dtype=np.float64)
        if not values.size:
            return None
        quantiles = np.quantile(values, list(QUANTILES.values())).tolist()
        ends = float(values.min()), float(values.max())
        return Spread(
            float(values.mean()), float(values.std()), *ends, dict(zip(QUANTILES, quantiles, strict=True))
        )


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """The requests whose prompts have a length in one range; tokens are totals."""

    name: str
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    num_shared_tokens: int


@dataclass(frozen=True, slots=True)
class Description:
    """A workload's requests in numbers. Lengths are in tokens, gaps in seconds.

    A request needs KV for all its tokens but the last. `num_unique_kv_tokens` counts a prefix that prompts
    share once. `num_sharing` prompts share a prefix.
    """

    num_requests: int
    num_users: int
    duration: float
    input: Spread
    output: Spread
    gap: Spread | None
    num_sharing: int
    num_shared_tokens: int
    most_kv_tokens: int
    num_kv_tokens: int
    num_unique_kv_tokens: int
    buckets: tuple[LengthBucket, ...]

    @property
    def request_rate(self) -> float | None:
        """Return the requests per second between the first and the last; None if all come at once."""
        return (self.num_requests - 1) / self.duration if self.duration else None


def describe(requests: Sequence[WorkloadRequest], *, length_scale: float = 1.0) -> Description:
    """Describe at least one request; `length_scale` multiplies the edges of the length buckets."""
    shared = list(prefix_hits(request.shape for request in requests))
    times = [request.arrival_time for request in requests]
    lengths_in = Spread.of(request.num_prompt_tokens for request in requests)
    lengths_out = Spread.of(request.num_output_tokens for request in requests)
    assert lengths_in is not None
    assert lengths_out is not None
    kv = [request.num_prompt_tokens + request.num_output_tokens - 1 for request in requests]
    return Description(
        num_requests=len(requests),
        num_users=len({request.shape.user for request in requests} - {""}),
        duration=times[-1] - times[0],
        input=lengths_in,
        output=lengths_out,
        gap=Spread.of(after - before for before, after in pairwise(times)),
        num_sharing=sum(map(bool, shared)),
        num_shared_tokens=sum(shared),
        most_kv_tokens=max(kv),
        num_kv_tokens=sum(kv),
        num_unique_kv_tokens=sum(kv) - sum(shared),
        buckets=tuple(_buckets(requests, shared, length_scale)),
    )


def _buckets(
    requests: Sequence[WorkloadRequest], shared: Sequence[int], length_scale: float
) -> Iterable[LengthBucket]:
    for name, (low, high) in zip(BUCKET_NAMES, pairwise(BUCKET_EDGES), strict=True):
        inside = [
            (request, num_shared)
            for request, num_shared in zip(requests, shared, strict=True)
            if low * length_scale <= request.num_prompt_tokens < high * length_scale
        ]
        yield LengthBucket(
            name,
            len(inside),
            sum(request.num_prompt_tokens for request, _ in inside),
            sum(request.num_output_tokens for request, _ in inside),
            sum(num_shared for _, num_shared in inside),
        )
