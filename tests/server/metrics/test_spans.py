"""Spans of requests, as a collector gets them."""

import sys

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_engine import ScriptedEngine, Serving

from loong.core.errors import ConfigError
from loong.core.request import FinishReason
from loong.observability.decision_log.recent import RecentLines
from loong.observability.decision_log.runs import RequestRun, RequestRuns
from loong.server.metrics.request_observers import RequestObservers, Targets
from loong.server.metrics.spans import Spans, otlp_exporter

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def over(request_id: str = "r", started_at: float | None = 2.0) -> RequestRun:
    """Return one that waits 1 s, prefills for 2 and decodes for 4; or that leaves while it waits."""
    run = RequestRun(
        request_id, 6, 20, 1.0, started_at=started_at, ended_at=8.0, end=FinishReason.STOP, dops=[4, 1]
    )
    run.first_token_at = None if started_at is None else 4.0
    run.num_output_tokens, run.num_cached_tokens = 10, 3
    return run


def sent(spans: Spans, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    spans.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_its_phases_within() -> None:
    exporter = InMemorySpanExporter()
    spans = Spans(exporter, "tiny", clock_start=100.0)
    spans.observe_run(over())
    found = sent(spans, exporter)
    times = {
        name: ((span.start_time or 0) / 1e9 - 100, (span.end_time or 0) / 1e9 - 100)
        for name, span in found.items()
    }
    assert times == {
        "llm_request": (1.0, 8.0),
        "queue": (1.0, 2.0),
        "prefill": (2.0, 4.0),
        "decode": (4.0, 8.0),
    }
    root = found["llm_request"]
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.completion_tokens"] == 10
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 3
    assert root.attributes["gen_ai.latency.time_to_first_token"] == 3.0
    assert root.attributes["loong.dops"] == (4, 1)
    assert all(span.parent == root.context for name, span in found.items() if name != "llm_request")


def test_who_left_the_queue_was_in_no_other_phase() -> None:
    exporter = InMemorySpanExporter()
    spans = Spans(exporter, "tiny", clock_start=0.0)
    spans.observe_run(over(started_at=None))
    assert sent(spans, exporter).keys() == {"llm_request", "queue"}


async def test_a_request_is_a_child_of_whom_its_client_says(serving: Serving) -> None:
    exporter, engine = InMemorySpanExporter(), ScriptedEngine()
    spans = Spans(exporter, "tiny", clock_start=0.0)
    request_observers = RequestObservers(
        "esp", RecentLines(), RequestRuns(), dict, lambda _num: Targets(1.0, 1.0), spans
    )
    async with (
        serving(engine, request_observers) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        for headers in ({"traceparent": f"00-{TRACE}-{PARENT}-01"}, {}):
            await client.post("/v1/completions", json={"prompt": "abc"}, headers=headers)
    for request in engine.requests:
        spans.observe_run(over(request.request_id))
    spans.close()
    first, second = (span for span in exporter.get_finished_spans() if span.name == "llm_request")
    assert first.parent is not None
    assert (f"{first.parent.trace_id:032x}", f"{first.parent.span_id:016x}") == (TRACE, PARENT)
    assert second.parent is None


async def test_a_parent_of_any_length_is_not_kept(serving: Serving) -> None:
    exporter, engine = InMemorySpanExporter(), ScriptedEngine()
    spans = Spans(exporter, "tiny", clock_start=0.0)
    request_observers = RequestObservers(
        "esp", RecentLines(), RequestRuns(), dict, lambda _num: Targets(1.0, 1.0), spans
    )
    async with (
        serving(engine, request_observers) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        for num_letters in (5, 5000):
            headers = {"traceparent": f"01-{TRACE}-{PARENT}-01-{'a' * num_letters}"}
            await client.post("/v1/completions", json={"prompt": "abc"}, headers=headers)
    for request in engine.requests:
        spans.observe_run(over(request.request_id))
    spans.close()
    first, second = (span for span in exporter.get_finished_spans() if span.name == "llm_request")
    assert first.parent is not None
    assert second.parent is None


async def test_a_parent_that_is_no_text_is_passed_over(serving: Serving) -> None:
    spans = Spans(InMemorySpanExporter(), "tiny", clock_start=0.0)
    request_observers = RequestObservers(
        "esp", RecentLines(), RequestRuns(), dict, lambda _num: Targets(1.0, 1.0), spans
    )
    async with (
        serving(ScriptedEngine(), request_observers) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        headers = [(b"traceparent", b"00-\xff")]
        answer = await client.post("/v1/completions", json={"prompt": "abc"}, headers=headers)
    spans.close()
    assert answer.status_code == 200


def test_a_collector_without_a_scheme_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="--otlp-traces-endpoint 'localhost:4318' is not a URL such as http://"
    ):
        otlp_exporter("localhost:4318")


def test_what_is_not_installed_is_refused_with_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .* pip install opentelemetry-sdk"):
        otlp_exporter("http://localhost:4318/v1/traces")
