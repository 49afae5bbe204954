"""Metrics of /metrics for Prometheus, and for Grafana boards made for vLLM."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from http_answers import post
from listening import BESIDE_ITS_ENGINE
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from scripted_engine import ScriptedEngine, Serving

from loong.core.decision import DecisionKind
from loong.core.placement import Placement
from loong.core.request import FinishReason, RequestView
from loong.core.snapshot import Snapshot
from loong.engine.prefix_hits import PrefixCounts
from loong.observability.decision_log.lines import (
    ArrivedLine,
    BatchStartedLine,
    Cause,
    Chunk,
    EndedLine,
    FirstTokenLine,
    Line,
    LoggedBatch,
    PlannedLine,
    Preempted,
    Reason,
)
from loong.observability.decision_log.recent import RecentLines
from loong.observability.decision_log.runs import RequestRuns
from loong.scheduler.esp.reasons import WaitReason
from loong.server.metrics.request_observers import RequestObservers, Targets

# Every series that the queries of vLLM's published Grafana boards name and that is here, with their labels.
BOARD = {
    "vllm:e2e_request_latency_seconds_bucket": {"model_name", "le"},
    "vllm:e2e_request_latency_seconds_count": {"model_name"},
    "vllm:e2e_request_latency_seconds_sum": {"model_name"},
    "vllm:generation_tokens_total": {"model_name"},
    "vllm:admission_rejections_total": {"model_name", "reason"},
    "vllm:inter_token_latency_seconds_bucket": {"model_name", "le"},
    "vllm:inter_token_latency_seconds_count": {"model_name"},
    "vllm:inter_token_latency_seconds_sum": {"model_name"},
    "vllm:kv_cache_usage_perc": {"model_name"},
    "vllm:num_requests_running": {"model_name"},
    "vllm:num_requests_waiting": {"model_name"},
    "vllm:num_requests_waiting_by_reason": {"model_name", "reason"},
    "vllm:prompt_tokens_total": {"model_name"},
    "vllm:request_decode_time_seconds_sum": {"model_name"},
    "vllm:request_generation_tokens_bucket": {"model_name", "le"},
    "vllm:request_max_num_generation_tokens_sum": {"model_name"},
    "vllm:request_num_preemptions_bucket": {"model_name", "le"},
    "vllm:request_prefill_time_seconds_sum": {"model_name"},
    "vllm:request_prompt_tokens_bucket": {"model_name", "le"},
    "vllm:request_queue_time_seconds_sum": {"model_name"},
    "vllm:request_success_total": {"model_name", "finished_reason"},
    "vllm:time_to_first_token_seconds_bucket": {"model_name", "le"},
    "vllm:time_to_first_token_seconds_count": {"model_name"},
    "vllm:time_to_first_token_seconds_sum": {"model_name"},
}
TYPE_WORDS = {"counter", "gauge", "histogram", "summary"}
OTHER_UNITS = {"ms", "milliseconds", "minutes", "hours", "us", "kb", "mb", "gb", "kilobytes", "percent"}


def one_request(request_observers: RequestObservers) -> None:
    """A request that waits 1 s, prefills for 2 and decodes 9 tokens in 4.5; it is preempted once."""
    chunk = Chunk("r", 0, 6, {0: 6}, {0: 6})
    for line in (
        ArrivedLine(1.0, "r", 6, 20, ()),
        PlannedLine(2.0, (Cause("request_arrived"),), (), (LoggedBatch(1, (0,), 1, (chunk,)),)),
        BatchStartedLine(2.0, 1),
        FirstTokenLine(4.0, "r"),
        PlannedLine(5.0, (Cause("batch_finished"),), (), preempted=(Preempted("r", {0: 6}),)),
        EndedLine(8.5, "r", FinishReason.STOP, 10),
    ):
        request_observers.runs(line, b"")


def observers_of_nothing() -> RequestObservers:
    errors, targets = {"decode": 0.5}, Targets(2.5, 0.6)
    return RequestObservers("esp", RecentLines(), RequestRuns(), lambda: errors, lambda _num_tokens: targets)


@asynccontextmanager
async def busy_server(serving: Serving) -> AsyncIterator[str]:
    """Yield a server that has done something of every kind."""
    request_observers = observers_of_nothing()
    async with serving(ScriptedEngine(), request_observers) as url:
        await post(url, "/v1/completions", prompt="abc", max_tokens=5)
        await post(url, "/v1/completions", prompt="abc", max_tokens=10**9)
        one_request(request_observers)
        yield url


async def reported(url: str, accept: str = "") -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.get(f"{url}/metrics", headers={"Accept": accept})


async def families(serving: Serving) -> list[Metric]:
    async with busy_server(serving) as url:
        return list(parse_text((await reported(url)).text))


async def test_vllms_board_finds_every_series_and_label_it_asks_for(serving: Serving) -> None:
    samples = [sample for family in await families(serving) for sample in family.samples]
    for name, labels in BOARD.items():
        found = [sample for sample in samples if sample.name == name]
        assert found, name
        assert all(labels <= sample.labels.keys() for sample in found), name
        assert all(sample.labels["model_name"] == "tiny" for sample in found), name
        assert not name.endswith(("_sum", "_count")) or found[0].value > 0, name


async def test_times_of_a_request_are_distinguished(serving: Serving) -> None:
    values = {
        (sample.name, sample.labels.get("latency"), sample.labels.get("outcome")): sample.value
        for family in await families(serving)
        for sample in family.samples
    }
    expected = {"queue": 1.0, "prefill": 2.0, "decode": 4.5, "inference": 6.5}
    for name, seconds in expected.items():
        assert values[f"vllm:request_{name}_time_seconds_sum", None, None] == seconds
    assert values["vllm:request_time_per_output_token_seconds_sum", None, None] == 0.5
    assert values["vllm:request_num_preemptions_sum", None, None] == 1
    assert values["vllm:request_num_preemptions_count", None, None] == 1
    assert values["loong:slo_requests_total", "ttft", "missed"] == 1
    assert values["loong:slo_requests_total", "tpot", "met"] == 1


async def test_refusals_are_counted_by_code(serving: Serving) -> None:
    (refused,) = (family for family in await families(serving) if family.name == "loong:request_refused")
    counted = [sample for sample in refused.samples if sample.name.endswith("_total")]
    assert [(sample.labels["code"], sample.value) for sample in counted] == [("context_length_exceeded", 1)]


async def by_reason(url: str, family: str) -> dict[str, float]:
    """Return the samples of a family by their reason."""
    (found,) = (one for one in parse_text((await reported(url)).text) if one.name == family)
    return {
        sample.labels["reason"]: sample.value
        for sample in found.samples
        if not sample.name.endswith("_created")
    }


async def test_rejections_at_admission_are_counted_by_reason(serving: Serving) -> None:
    engine = ScriptedEngine(pause_at=0)
    async with serving(engine, observers_of_nothing(), max_waiting_requests=1) as url:
        reasons = {"queue_full", "rate_limit_exceeded", "shutting_down", "too_many_bodies"}
        assert await by_reason(url, "vllm:admission_rejections") == dict.fromkeys(reasons, 0)
        async with asyncio.TaskGroup() as group:
            group.create_task(post(url, "/v1/completions", prompt="abc", max_tokens=5))
            await engine.paused.wait()
            refused = await post(url, "/v1/completions", prompt="abc", max_tokens=5, n=2)
            await post(url, "/v1/completions", prompt="abc", max_tokens=0)  # at no time it may be served
            engine.resume.set()
        assert refused.status_code == 503
        counted = await by_reason(url, "vllm:admission_rejections")
    assert counted == dict.fromkeys(reasons, 0) | {"queue_full": 1}


NOBODY = {"capacity": 0, "deferred": 0, "shared_prefix": 0}


async def test_requests_that_wait_are_distinguished_by_reason(serving: Serving) -> None:
    """Of four, one is deferred, one was but has been preempted since, one has no place, one
    gave no reason.
    """
    ids = ("deferred", "preempted", "no place", "new")
    views = tuple(RequestView(i, 6, 0, 20, 0.0, None, Placement()) for i in ids)
    engine, request_observers = ScriptedEngine(), observers_of_nothing()
    async with serving(engine, request_observers) as url:
        assert await by_reason(url, "vllm:num_requests_waiting_by_reason") == NOBODY
        engine.cluster = Snapshot(1.0, engine.cluster.instances, waiting=views, following=views[:2])
        reasons = (
            Reason(DecisionKind.WAIT, ("deferred", "preempted", "gone"), WaitReason.DEFERRED_BY_DEADLINE),
            Reason(DecisionKind.WAIT, ("no place",), WaitReason.BUSY),
            Reason(DecisionKind.DEFER, ("new",), WaitReason.PAUSED),
        )
        causes = (Cause("request_arrived"),)
        lines: list[Line] = [ArrivedLine(0.0, i, 6, 20, ()) for i in ids]
        lines.append(PlannedLine(0.5, causes, (), reasons=reasons))
        lines.append(PlannedLine(0.6, causes, (), preempted=(Preempted("preempted", {0: 6}),)))
        for line in lines:
            request_observers.runs(line, b"")
        waiting = {"capacity": 3, "deferred": 1, "shared_prefix": 2}
        assert await by_reason(url, "vllm:num_requests_waiting_by_reason") == waiting
        (found,) = (
            one for one in parse_text((await reported(url)).text) if one.name == "vllm:num_requests_waiting"
        )
        assert found.samples[0].value == sum(waiting.values())


async def test_hits_of_the_prefix_cache_are_counted_by_place(serving: Serving) -> None:
    counts = PrefixCounts(num_asked=90, num_hits=40, read_by_instance={0: 30, 2: 25})
    async with serving(ScriptedEngine(prefix_counts=counts)) as url:
        values = {
            (sample.name, sample.labels.get("tier"), sample.labels.get("instance")): sample.value
            for family in parse_text((await reported(url)).text)
            for sample in family.samples
        }
    assert values["vllm:prefix_cache_queries_total", None, None] == 90
    assert values["vllm:prefix_cache_hits_total", None, None] == 40
    assert values["loong:cached_tokens_total", "device", "0"] == 30
    assert values["loong:cached_tokens_total", "device", "2"] == 25


@BESIDE_ITS_ENGINE
async def test_the_exposition_keeps_the_rules_of_prometheus(serving: Serving) -> None:
    """As promtool has them, but for colons, which are vLLM's."""
    found = await families(serving)
    names = [family.name for family in found]
    assert len(names) == len(set(names))
    for family in found:
        words = set(re.split("[:_]", family.name))
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert not words & TYPE_WORDS, family.name
        assert not words & OTHER_UNITS, family.name
        assert re.fullmatch("[a-z0-9:_]+", family.name), family.name
        if family.type == "gauge":
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_info")), family.name
        series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(series) == len(set(series)), family.name
        if family.type == "counter":
            assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples)


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=1.0.0", "text/plain", ""])
async def test_who_asks_for_openmetrics_gets_it(serving: Serving, accept: str) -> None:
    async with busy_server(serving) as url:
        answer = await reported(url, accept)
    is_open = accept.startswith("application/openmetrics-text")
    assert answer.headers["Content-Type"].startswith(
        "application/openmetrics-text" if is_open else "text/plain"
    )
    assert answer.text.endswith("# EOF\n") == is_open
    parsed = {family.name for family in (parse_openmetrics if is_open else parse_text)(answer.text)}
    assert {"vllm:prompt_tokens", "loong:esp_group_size", "loong:scheduler_seconds"} <= parsed


@BESIDE_ITS_ENGINE
async def test_every_series_is_explained(serving: Serving) -> None:
    explained = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    for family in await families(serving):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name.endswith("_created") or f"`{name}" in explained, name
