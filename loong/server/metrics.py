"""Prometheus metrics: vLLM's names where they mean the same, so that its dashboards fill; ours for the rest.

What only the server sees is counted as it happens; the cluster's part is read from a snapshot when asked.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

from loong.core.request import SLO, FinishReason
from loong.core.snapshot import Snapshot
from loong.decision_log.runs import RequestRun
from loong.server.cluster_metrics import ClusterCollector, CostModelCollector

_TTFT_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_ITL_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_PLAN_SECONDS = tuple(digit * 10**power for power in range(-5, 0) for digit in (1, 2, 5))
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
_SERVED = (FinishReason.STOP.value, FinishReason.LENGTH.value)


class ServerMetrics:
    """All metrics of one server, in a registry of its own. Times are seconds."""

    def __init__(self, model_name: str, snapshot: Callable[[], Snapshot]) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        histogram, counter = self._histogram, self._counter
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT_SECONDS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between tokens.", _ITL_SECONDS)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time between tokens.",
            _ITL_SECONDS,
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", _E2E_SECONDS)
        self._queued = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first batch.", _E2E_SECONDS
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From the first batch to the first token.", _E2E_SECONDS
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _E2E_SECONDS
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "From the first batch to the last token.", _E2E_SECONDS
        )
        self._prompts = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._outputs = histogram("vllm:request_generation_tokens", "Output tokens of a request.", _TOKENS)
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Output tokens of a choice.", _TOKENS
        )
        self._asked = histogram("vllm:request_params_max_tokens", "Output tokens asked for.", _TOKENS)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._scheduler = histogram("loong:scheduler_seconds", "To make one plan.", _PLAN_SECONDS)
        self._success = self._labeled(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._refused = self._labeled("loong:request_refused", "Requests answered with an error.", "code")
        self._in_time = self._labeled(
            "loong:slo_requests", "Latencies of served requests against their targets.", "latency", "outcome"
        )
        self._registry.register(ClusterCollector(model_name, snapshot))
        ProcessCollector(registry=self._registry)

    def watch_cost_model(self, errors: Callable[[], Mapping[str, float]]) -> None:
        """Tell also how far predicted times of batches are off, relative, by phase."""
        self._registry.register(CostModelCollector(self._model_name, errors))

    def saw_first_token(self, ttft: float, num_prompt_tokens: int) -> None:
        """Count a first token, and the prompt that was processed for it: 0 if for another choice too."""
        self._ttft.observe(ttft)
        if num_prompt_tokens:
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
        if reason.value in _SERVED:
            self._e2e.observe(latency)
            self._outputs.observe(num_output_tokens)

    def saw_refusal(self, code: str) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(self._model_name, code).inc()

    def saw_plan(self, seconds: float) -> None:
        """Count a plan, and what it took to make."""
        self._scheduler.observe(seconds)

    def saw_run(self, run: RequestRun, target: SLO) -> None:
        """Count a request that was served whole, as the scheduler saw it, against its `target`."""
        if run.end not in _SERVED or run.ended_at is None:
            return
        if run.started_at is None or run.first_token_at is None:
            return
        self._queued.observe(run.started_at - run.arrived_at)
        self._prefill.observe(run.first_token_at - run.started_at)
        self._decode.observe(run.ended_at - run.first_token_at)
        self._inference.observe(run.ended_at - run.started_at)
        self._longest.observe(run.num_output_tokens)
        self._asked.observe(run.max_tokens)
        if run.tpot is not None:
            self._tpot.observe(run.tpot)
        for name, got, promised in (("ttft", run.ttft, target.ttft), ("tpot", run.tpot, target.tpot)):
            if got is not None:
                self._in_time.labels(self._model_name, name, "met" if got <= promised else "missed").inc()

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text that Prometheus reads, and its type, which a client's `Accept` may choose."""
        if "application/openmetrics-text" not in accept:
            return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
        # Colons are legal. By default the library makes them underscores, and no board would find its series.
        text: bytes = openmetrics.generate_latest(  # type: ignore[no-untyped-call]
            self._registry, escaping=openmetrics.ALLOWUTF8
        )
        return text, openmetrics.CONTENT_TYPE_LATEST

    def _histogram(self, name: str, what: str, buckets: Iterable[float]) -> Histogram:
        family = Histogram(name, what, ("model_name",), registry=self._registry, buckets=tuple(buckets))
        return family.labels(self._model_name)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, ("model_name",), registry=self._registry).labels(self._model_name)

    def _labeled(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, ("model_name", *labels), registry=self._registry)
