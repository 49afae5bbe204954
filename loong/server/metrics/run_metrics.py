"""Metrics that the engine's process counts for requests and plans."""

from loong.observability.decision_log.runs import RequestRun
from loong.server.metrics.prometheus import E2E_SECONDS, ITL_SECONDS, TOKENS, MetricFamilies
from loong.server.metrics.request_metrics import SERVED
from loong.server.metrics.request_observers import Targets

_PREEMPTIONS = (0, 1, 2, 3, 4, 5, 10, 20)
_PLAN_SECONDS = tuple(digit * 10**power for power in range(-5, 0) for digit in (1, 2, 5))


class RunMetrics:
    """The requests as the scheduler sees them, and its plans."""

    def __init__(self, families: MetricFamilies) -> None:
        histogram = families.histogram
        self._model_name = families.model_name
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time between tokens.",
            ITL_SECONDS,
        )
        self._queued = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first batch.", E2E_SECONDS
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From the first batch to the first token.", E2E_SECONDS
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", E2E_SECONDS
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "From the first batch to the last token.", E2E_SECONDS
        )
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens", "Output tokens of a choice.", TOKENS
        )
        self._asked = histogram("vllm:request_params_max_tokens", "Output tokens asked for.", TOKENS)
        self._preemptions = histogram(
            "vllm:request_num_preemptions", "Times that a request lost its KV.", _PREEMPTIONS
        )
        self._scheduler = histogram("loong:scheduler_seconds", "To make one plan.", _PLAN_SECONDS)
        self._in_time = families.labeled(
            "loong:slo_requests", "Latencies of served requests against their targets.", "latency", "outcome"
        )

    def observe_plan(self, seconds: float) -> None:
        """Count a plan and the seconds to make it."""
        self._scheduler.observe(seconds)

    def observe_run(self, run: RequestRun, target: Targets) -> None:
        """Count a completely served request, as the scheduler saw it, against its `target`."""
        if run.end not in SERVED or run.ended_at is None:
            return
        if run.started_at is None or run.first_token_at is None:
            return
        self._queued.observe(run.started_at - run.arrived_at)
        self._prefill.observe(run.first_token_at - run.started_at)
        self._decode.observe(run.ended_at - run.first_token_at)
        self._inference.observe(run.ended_at - run.started_at)
        self._longest.observe(run.num_output_tokens)
        self._asked.observe(run.max_tokens)
        self._preemptions.observe(run.num_preemptions)
        if run.tpot is not None:
            self._tpot.observe(run.tpot)
        for name, got, promised in (("ttft", run.ttft, target.ttft), ("tpot", run.tpot, target.tpot)):
            if got is not None:
                self._in_time.labels(self._model_name, name, "met" if got <= promised else "missed").inc()
