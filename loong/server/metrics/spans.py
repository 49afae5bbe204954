"""OpenTelemetry spans: one for each request, and inside it the queue, the prefill and the decode."""

from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler

import loong
from loong.core.errors import ConfigError
from loong.core.request import RequestId
from loong.observability.decision_log.runs import RequestRun

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

MAX_PARENTS = 100_000
MAX_TRACEPARENT = 128  # characters; version 0 of the format has 55
_NANOSECONDS = 1e9
TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)


def otlp_exporter(endpoint: str) -> "SpanExporter":
    """Return an exporter that sends spans to a collector, such as http://localhost:4318/v1/traces.

    Raises `ConfigError` if the address is not a URL, or if OpenTelemetry is not installed.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is not a URL such as http://localhost:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install opentelemetry-sdk "
            f"opentelemetry-exporter-otlp-proto-http ({error})"
        ) from None
    return OTLPSpanExporter(endpoint)


@web.middleware
async def note_traceparent(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Record the parent span that a client names, for the handler of the request."""
    traceparent = request.headers.get("traceparent", "")
    is_kept = 0 < len(traceparent) <= MAX_TRACEPARENT and traceparent.isascii()
    TRACEPARENT.set(traceparent if is_kept else None)
    return await handler(request)


class Spans:
    """Makes spans of ended requests, and sends them in its own thread."""

    def __init__(self, exporter: "SpanExporter", model_name: str, clock_start: float) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "loong", "service.version": loong.__version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("loong", loong.__version__)
        self._model_name, self._clock_start = model_name, clock_start
        self._parents: dict[RequestId, str] = {}

    def note(self, request_id: RequestId, traceparent: str) -> None:
        """Record the parent of a request's span.

        Beyond a bound the oldest are dropped, as some never arrive.
        """
        self._parents[request_id] = traceparent
        if len(self._parents) > MAX_PARENTS:
            del self._parents[next(iter(self._parents))]

    def observe_run(self, run: RequestRun) -> None:
        """Make the spans of an ended request."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        assert run.ended_at is not None
        root = self._tracer.start_span(
            "llm_request",
            context=_context(self._parents.pop(run.request_id, None)),
            kind=SpanKind.SERVER,
            start_time=self._time(run.arrived_at),
            attributes=dict(self._attributes(run)),
        )
        for name, start, end in _phases(run, run.ended_at):
            part = self._tracer.start_span(
                name, context=set_span_in_context(root), start_time=self._time(start)
            )
            part.end(self._time(end))
        root.end(self._time(run.ended_at))

    def close(self) -> None:
        """Send the remaining spans. It takes as long as the collector takes."""
        self._provider.shutdown()

    def _time(self, seconds: float) -> int:
        return round((self._clock_start + seconds) * _NANOSECONDS)

    def _attributes(self, run: RequestRun) -> Iterator[tuple[str, str | int | float | list[int]]]:
        """Yield the attributes: vLLM's names, and ours."""
        yield "gen_ai.response.model", self._model_name
        yield "gen_ai.request.id", run.request_id
        yield "gen_ai.request.max_tokens", run.max_tokens
        yield "gen_ai.usage.prompt_tokens", run.num_prompt_tokens
        yield "gen_ai.usage.cache_read.input_tokens", run.num_cached_tokens
        yield "gen_ai.usage.completion_tokens", run.num_output_tokens
        yield "loong.finish_reason", run.end or ""
        yield "loong.dops", run.dops
        if run.started_at is not None:
            yield "gen_ai.latency.time_in_queue", run.started_at - run.arrived_at
        if run.ttft is not None:
            yield "gen_ai.latency.time_to_first_token", run.ttft
        if run.ended_at is not None:
            yield "gen_ai.latency.e2e", run.ended_at - run.arrived_at


def _phases(run: RequestRun, ended_at: float) -> Iterator[tuple[str, float, float]]:
    """Yield the phases of a request, as far as it came: names, starts and ends."""
    times = [run.arrived_at, run.started_at, run.first_token_at]
    known = [time for time in times if time is not None]
    return zip(("queue", "prefill", "decode"), known, [*known[1:], ended_at], strict=False)


def _context(traceparent: str | None) -> "Context | None":
    if traceparent is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
