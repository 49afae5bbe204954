"""Metrics that each process counts for the requests that it answers."""

from loong.core.request import FinishReason
from loong.server.metrics.prometheus import E2E_SECONDS, ITL_SECONDS, TOKENS, TTFT_SECONDS, MetricFamilies

_MAX_UNCOUNTED = 32
ADMISSION_CODES = ("queue_full", "rate_limit_exceeded", "shutting_down", "too_many_bodies")
SERVED = (FinishReason.STOP, FinishReason.LENGTH)


class RequestMetrics:
    """The requests as their clients see them. Each API process counts its own."""

    def __init__(self, families: MetricFamilies) -> None:
        histogram, counter, labeled = families.histogram, families.counter, families.labeled
        self._model_name = families.model_name
        self._latencies: list[float] = []  # between tokens, not counted yet: counting one by one is slow
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", TTFT_SECONDS)
        self._itl = histogram("vllm:inter_token_latency_seconds", "Between tokens.", ITL_SECONDS)
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", E2E_SECONDS)
        self._prompts = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._outputs = histogram("vllm:request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._success = labeled("vllm:request_success", "Requests that ended, by reason.", "finished_reason")
        self._refused = labeled("loong:request_refused", "Requests answered with an error.", "code")
        rejected = labeled("vllm:admission_rejections", "Requests refused for want of room.", "reason")
        self._rejected = {code: rejected.labels(self._model_name, code) for code in ADMISSION_CODES}

    def observe_first_token(self, ttft: float, num_prompt_tokens: int) -> None:
        """Count a first token, and the prompt tokens computed for it, which are 0 for a further choice."""
        self._ttft.observe(ttft)
        if num_prompt_tokens:
            self._prompts.observe(num_prompt_tokens)
            self._prompt_tokens.inc(num_prompt_tokens)
        self._generation_tokens.inc()

    def observe_token(self, latency: float) -> None:
        """Record the latency of a token after the first.

        It is counted soon, or when the next request ends.
        """
        self._latencies.append(latency)
        if len(self._latencies) >= _MAX_UNCOUNTED:
            self._count_tokens()

    def observe_end(self, reason: FinishReason, latency: float, num_output_tokens: int) -> None:
        """Count an ended request. Only a request that was served completely has a latency."""
        self._count_tokens()
        self._success.labels(self._model_name, reason.value).inc()
        if reason in SERVED:
            self._e2e.observe(latency)
            self._outputs.observe(num_output_tokens)

    def _count_tokens(self) -> None:
        latencies, self._latencies = self._latencies, []
        if latencies:
            self._itl.observe_all(latencies)
            self._generation_tokens.inc(len(latencies))

    def observe_refusal(self, code: str) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(self._model_name, code).inc()
        if (rejected := self._rejected.get(code)) is not None:
            rejected.inc()
