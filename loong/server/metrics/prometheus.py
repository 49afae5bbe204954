"""Prometheus metrics: vLLM's names for equal meanings, so that its dashboards work, and our own names."""

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
E2E_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))


class BatchHistogram(Histogram):
    """A histogram that records many values at the cost of few."""

    def observe_all(self, values: Sequence[float]) -> None:
        """Record several values."""
        for bucket, number in Counts(bisect_left(self._upper_bounds, value) for value in values).items():
            self._buckets[bucket].inc(number)
        self._sum.inc(sum(values))


class MetricFamilies:
    """Makes the metrics of one model in a registry. Times are in seconds."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry, self.model_name = registry, model_name

    def histogram(self, name: str, what: str, buckets: Iterable[float]) -> BatchHistogram:
        """Return a histogram with these upper bounds."""
        family = BatchHistogram(name, what, ("model_name",), registry=self.registry, buckets=tuple(buckets))
        return family.labels(self.model_name)

    def counter(self, name: str, what: str) -> Counter:
        """Return a counter without further labels."""
        return Counter(name, what, ("model_name",), registry=self.registry).labels(self.model_name)

    def labeled(self, name: str, what: str, *labels: str) -> Counter:
        """Return a counter with further labels. Its users name all labels, including the model's."""
        return Counter(name, what, ("model_name", *labels), registry=self.registry)


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics as text, and its content type, which `accept` may choose."""
    if "application/openmetrics-text" not in accept:
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
    # Colons are legal. By default the library replaces them, and dashboards would not find the series.
    text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
        registry, escaping=openmetrics.ALLOWUTF8
    )
    return text, openmetrics.CONTENT_TYPE_LATEST
