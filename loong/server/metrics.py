"""Prometheus metrics: vLLM's names where they mean the same, so that its dashboards fill; ours for the rest.

What only the server sees is counted as it happens; the cluster's part is read from a snapshot when asked.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from loong.core.request import FinishReason
from loong.core.snapshot import Snapshot

_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
_DOPS = (*range(1, 9), 12, 16, 24, 32, 64)


class ServerMetrics:
    """All metrics of one server, in a registry of its own. Times are seconds."""

    def __init__(self, model_name: str, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to first token.", _TTFT_SECONDS
        )
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Between tokens.", _ITL_SECONDS)
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", _E2E_SECONDS)
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self._outputs = self._histogram("vllm:request_generation_tokens", "Output tokens a request.", _TOKENS)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._registry.register(ClusterCollector(model_name, snapshot))

    def watch_cost_model(self, errors: Callable[[], Mapping[str, float]]) -> None:
        """Tell also how far predicted times of batches are off, relative, by phase."""
        self._registry.register(CostModelCollector(self._model_name, errors))

    def saw_first_token(self, ttft: float, num_prompt_tokens: int) -> None:
        """Count a prompt that was processed, and the token it gave."""
        self._ttft.observe(ttft)
        self._prompts.observe(num_prompt_tokens)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc()

    def saw_token(self, latency: float) -> None:
        """Count a token after the first."""
        self._itl.observe(latency)
        self._generation_tokens.inc()

    def saw_end(self, reason: FinishReason, latency: float, num_output_tokens: int) -> None:
        """Count a request that is over; only one that was served whole has a latency."""
        self._success.labels(self._model_name, reason.value).inc()
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._e2e.observe(latency)
            self._outputs.observe(num_output_tokens)

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, what: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, what, ("model_name",), registry=self._registry, buckets=tuple(buckets))
        return family.labels(self._model_name)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, ("model_name",), registry=self._registry).labels(self._model_name)


class ClusterCollector(Collector):
    """What a snapshot tells, at the time it is asked for."""

    def __init__(self, model_name: str, snapshot: Callable[[], Snapshot]) -> None:
        self._model_name = model_name
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Take a snapshot and say it in metrics."""
        snapshot = self._snapshot()
        stats = snapshot.stats
        capacity, used = snapshot.kv_capacity, snapshot.kv_used
        yield self._gauge("vllm:num_requests_running", "Requests being computed.", len(snapshot.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests without KV.", len(snapshot.waiting))
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "KV in use; 1 is all.", used / capacity if capacity else 0
        )
        yield self._counter("vllm:num_preemptions", "Requests that lost their KV.", stats.num_preemptions)
        yield self._counter("loong:esp_scale_up", "Groups that grew.", stats.num_scale_ups)
        yield self._counter("loong:esp_scale_down", "Groups that shrank.", stats.num_scale_downs)
        yield self._counter(
            "loong:kv_migrated_tokens", "Tokens of KV moved at rest.", stats.num_migrated_tokens
        )
        yield self._counter(
            "loong:kv_retained_tokens", "Tokens of KV kept in a ring prefill.", stats.num_retained_tokens
        )
        yield self._group_sizes(stats.num_batches_by_dop)
        yield self._instances(snapshot)

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, what, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, what: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, what, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _group_sizes(self, num_batches_by_dop: Mapping[int, int]) -> HistogramMetricFamily:
        family = HistogramMetricFamily("loong:esp_group_size", "Batches by DoP.", labels=("model_name",))
        buckets = [
            (f"{float(bound)}", sum(count for dop, count in num_batches_by_dop.items() if dop <= bound))
            for bound in _DOPS
        ]
        buckets.append(("+Inf", sum(num_batches_by_dop.values())))
        total = sum(dop * count for dop, count in num_batches_by_dop.items())
        family.add_metric((self._model_name,), buckets, total)
        return family

    def _instances(self, snapshot: Snapshot) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "loong:instance_kv_tokens", "Tokens of KV held, by instance.", labels=("model_name", "instance")
        )
        for instance in snapshot.instances:
            family.add_metric((self._model_name, str(instance.instance_id)), instance.kv_used)
        return family


class CostModelCollector(Collector):
    """How good predictions are at the time it is asked."""

    def __init__(self, model_name: str, errors: Callable[[], Mapping[str, float]]) -> None:
        self._model_name, self._errors = model_name, errors

    def collect(self) -> Iterator[Metric]:
        """One gauge for each phase of which a batch has run."""
        family = GaugeMetricFamily(
            "loong:cost_model_relative_error",
            "How far predicted times of the last batches are off, in the mean; 1 is twice or half as long.",
            labels=("model_name", "phase"),
        )
        for phase, error in self._errors().items():
            family.add_metric((self._model_name, phase), error)
        yield family
