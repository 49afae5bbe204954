"""The data that the dashboard's page receives."""

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from decision_logs import EventReporter, prefill_two
from http_answers import get_json
from scripted_engine import ScriptedEngine, Serving
from snapshots import waiting

from loong.core.cluster_history import BatchSlice, ChangeKind, ClusterHistory, InstanceChange, KVLevel
from loong.core.cost.work import Phase
from loong.core.events import RequestAborted
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.snapshot import Snapshot
from loong.engine.largest_prefixes import CachedPrefix
from loong.engine.prefix_hits import PrefixCounts
from loong.observability.decision_log.log import DecisionLog
from loong.observability.decision_log.recent import RecentLines, index_of
from loong.observability.decision_log.runs import RequestRuns
from loong.server.dashboard.past import NUM_FIELDS, Past
from loong.server.metrics.request_observers import RequestObservers, Targets
from loong.workloads.report.timeline_cells import Work

INSTANCES = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 100) for i in range(3))
OLD, NEW = (
    BatchSlice(7, ESPGroup((1, 0)), Phase.PREFILL, start, start + 0.5, ("r1", "r2"), ((1, 20), (0, 10)))
    for start in (10.0, 299.0)
)


def source() -> RequestObservers:
    return RequestObservers(
        "esp",
        RecentLines(),
        RequestRuns(),
        lambda: {"prefill": 0.25},
        lambda num_tokens: Targets(num_tokens, 0.5),
    )


def two_requests(source: RequestObservers) -> Snapshot:
    """Return a snapshot of one request in flight and one that has left, as the source has seen them."""
    reporter = EventReporter(DecisionLog(None, listeners=[source.recent, source.runs]), INSTANCES)
    prefill_two(reporter)
    reporter.report(RequestAborted(2.0, "r001"))
    return reporter.state.snapshot(300.0)


@asynccontextmanager
async def ticks(url: str, headers: dict[str, str]) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with (
        httpx.AsyncClient(timeout=30) as client,
        client.stream("GET", f"{url}/dashboard/events", headers=headers) as response,
    ):
        lines = response.aiter_lines()
        yield (json.loads(line.removeprefix("data: ")) async for line in lines if line.startswith("data: {"))


async def first(url: str, number: int, **headers: str) -> Sequence[dict[str, Any]]:
    async with ticks(url, headers) as events:
        return [await anext(events) for _ in range(number)]


async def test_a_proxy_is_reported_not_to_hold_events_back(serving: Serving) -> None:
    async with (
        serving(ScriptedEngine(), source()) as url,
        httpx.AsyncClient(timeout=30) as client,
        client.stream("GET", f"{url}/dashboard/events") as response,
    ):
        assert response.headers["X-Accel-Buffering"] == "no"


async def test_a_page_is_reported_what_is_and_then_what_is_new(serving: Serving) -> None:
    dashboard = source()
    engine = ScriptedEngine(cluster=two_requests(dashboard), past=ClusterHistory((OLD, NEW)))
    async with serving(engine, dashboard) as url:
        hello, tick, later = await first(url, 3)
    assert (hello["model"], hello["policy"]) == ("tiny", "esp")
    assert [batch["start"] for batch in tick["ended"]] == [299.0]  # the other one is too long ago
    assert tick["ended"][0]["kv"] == [20, 10]
    assert [instance[:3] for instance in tick["instances"]] == [[0, 3, 100], [1, 3, 100], [2, 0, 100]]
    (live,), (over,) = tick["live"], tick["over"]
    assert (live["id"], live["state"], live["output"], live["dops"]) == ("r000", "decode", 1, [2])
    assert (over["id"], over["state"], over["ttft"]) == ("r001", "abort", 1.0)
    assert (over["ttft_target"], over["tpot_target"]) == (6.0, 0.5)
    assert tick["errors"] == {"prefill": 0.25}
    assert not later["ended"]
    assert not later["over"]


async def test_a_page_is_reported_what_is_cached_and_how_much_is_found_there(serving: Serving) -> None:
    dashboard, counts = source(), PrefixCounts(90, 40, {0: 40})
    snapshot = two_requests(dashboard)
    first_one, *others = snapshot.instances
    snapshot = replace(
        snapshot, instances=(first_one.holding(3, 50), *others), following=(waiting("r002", 5),)
    )
    largest = (CachedPrefix("kv-3", 7, {0: 40, 1: 10}, 2),)
    engine = ScriptedEngine(cluster=snapshot, prefix_counts=counts, largest_prefixes=largest)
    async with serving(engine, dashboard) as url:
        _, tick = await first(url, 2)
    (prefix,) = tick["largest_prefixes"]
    assert prefix["instances"] == {"0": 40, "1": 10}
    assert [prefix[name] for name in ("id", "start", "num_tokens", "num_readers")] == ["kv-3", 7, 50, 2]
    assert tick["instances"][0] == [0, 3, 100, "full", 50]
    assert (tick["prefix_cache"], tick["num_waiting"]) == ([90, 40], 1)
    async with serving(ScriptedEngine(cluster=snapshot), source()) as url:
        _, tick = await first(url, 2)
    assert tick["prefix_cache"] is None


async def test_changes_of_instances_are_reported_in_every_tick_for_as_long_as_a_page_shows_them(
    serving: Serving,
) -> None:
    dashboard = source()
    old, new = (
        InstanceChange(1, ChangeKind.JOINED, -1.0),
        InstanceChange(2, ChangeKind.LOST, 200.0, "it was killed"),
    )
    repair = replace(NEW, num_recomputed_tokens=5)
    past = ClusterHistory((repair,), changes=(old, new))
    async with serving(ScriptedEngine(cluster=two_requests(dashboard), past=past), dashboard) as url:
        _, tick, later = await first(url, 3)
    shown = [{"instance": 2, "kind": "lost", "time": 200.0, "reason": "it was killed"}]
    assert tick["changes"] == later["changes"] == shown
    assert [batch["recomputed"] for batch in tick["ended"]] == [5]


async def test_what_idle_instances_hold_is_reported_with_its_time(serving: Serving) -> None:
    dashboard = source()
    past = ClusterHistory((NEW,), kv_levels=(KVLevel(1, 100.0, 9), KVLevel(1, 299.5, 0)))
    async with serving(ScriptedEngine(cluster=two_requests(dashboard), past=past), dashboard) as url:
        _, tick, later = await first(url, 3)
    assert tick["kv_levels"] == [{"instance": 1, "time": 299.5, "num_tokens": 0}]
    assert not later["kv_levels"]


def test_the_page_has_a_mark_for_every_change_of_an_instance() -> None:
    marks = re.findall(r"^  ([a-z]+): \[", PAGE.joinpath("gantt.js").read_text(), re.MULTILINE)
    assert marks == [kind.value for kind in ChangeKind]


async def test_a_request_reports_its_story(serving: Serving) -> None:
    dashboard = source()
    async with serving(ScriptedEngine(cluster=two_requests(dashboard)), dashboard) as url:
        story = await get_json(url, "/dashboard/requests/r000")
        unknown = await get_json(url, "/dashboard/requests/r999")
    assert story["heading"][0].startswith("Request r000: a prompt of 6 tokens")
    assert "Its first token" in story["chapters"][-1]["sentences"][0]
    assert "r999" in unknown["error"]["message"]


async def test_a_batch_names_its_requests(serving: Serving) -> None:
    async with serving(ScriptedEngine(past=ClusterHistory((NEW,))), source()) as url:
        batch = await get_json(url, "/dashboard/batches/7")
        assert [part["id"] for part in batch["parts"]] == ["r1", "r2"]
        assert (batch["phase"], batch["seconds"], batch["predicted_seconds"]) == ("prefill", 0.5, None)
        assert (await get_json(url, "/dashboard/batches/8"))["error"]["code"] == "batch_not_found"


async def test_a_batch_reports_what_it_computes_how_long_that_takes_and_why(serving: Serving) -> None:
    dashboard = source()
    async with serving(ScriptedEngine(cluster=two_requests(dashboard)), dashboard) as url:
        index = index_of(dashboard.recent.written())
        for batch_id, (_, planned) in index.batches.items():
            reported = await get_json(url, f"/dashboard/batches/{batch_id}")
            assert reported["instances"] == list(planned.instance_ids)
            assert reported["predicted_seconds"] == planned.predicted_seconds
            assert [part["id"] for part in reported["parts"]] == [
                *(chunk.request_id for chunk in planned.chunks),
                *(decode.request_id for decode in planned.decodes),
            ]
            assert all(part["prompt"] == 6 for part in reported["parts"])
            end = index.batch_ends.get(batch_id)
            assert reported["seconds"] == (None if end is None else end.seconds)
            assert reported["why"][0].startswith("Planned as ")


async def test_the_bare_address_leads_to_the_dashboard_and_is_open(serving: Serving) -> None:
    async with (
        serving(ScriptedEngine(), source(), api_keys=("k",)) as url,
        httpx.AsyncClient(timeout=30) as client,
    ):
        start = await client.get(url)
        assert start.status_code == 200
        assert "default-src 'self'" in start.headers["Content-Security-Policy"]
        links = re.findall(r'href="(/[^"]*)"', start.text)
        assert {"/dashboard", "/openapi.json", "/metrics"} <= set(links)
        for link in links:
            answer = await client.get(url + link, headers={"Authorization": "Bearer k"})
            assert answer.status_code == 200, link


async def test_a_page_is_reported_the_past_and_who_was_in_time(serving: Serving) -> None:
    dashboard = source()
    async with serving(ScriptedEngine(cluster=two_requests(dashboard)), dashboard) as url:
        hello, tick = await first(url, 2)
    assert hello["past"]
    assert all(len(sample) == NUM_FIELDS for sample in hello["past"])
    assert hello["past"][0][0] == tick["now"] == 300.0
    (over,) = tick["over"]
    assert over["waited"] is not None
    assert tick["num_judged"] == hello["past"][0][5] == 0  # it was over before the counter began


def test_the_past_is_bounded_by_bytes_and_keeps_what_is_newest() -> None:
    dashboard = source()
    past = Past(dashboard, max_bytes=8 * NUM_FIELDS * 3 + 5)
    for time in range(5):
        past.sample(Snapshot(float(time), INSTANCES))
    assert [sample[0] for sample in past.samples()] == [2.0, 3.0, 4.0]


def test_requests_are_judged_by_their_targets_when_they_are_over() -> None:
    dashboard = source()
    past = Past(dashboard)
    two_requests(dashboard)  # one of which leaves within its target
    assert (past.num_judged, past.num_met) == (1, 1)


PAGE = files("loong.server.dashboard").joinpath("page")


def schemes() -> tuple[dict[str, str], dict[str, str]]:
    """Return the colors of the page in light and in dark."""
    light, dark = re.findall(r":root \{(.*?)\}", PAGE.joinpath("style.css").read_text(), re.DOTALL)
    by_day = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]+)", light))
    return by_day, by_day | dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]+)", dark))


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""

    def luminance(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colors_stand_out_by_day_and_by_night_and_are_the_reports() -> None:
    for colors in schemes():
        for work in ("long", "short", "decode"):
            assert contrast(colors[work], colors["panel"]) >= 3, work
            assert contrast(colors[work], colors["on-work"]) >= 3, work
            assert colors[work] == Work[work.upper()].value.lower()
        for words in ("text", "dim", "good", "bad"):
            assert contrast(colors[words], colors["panel"]) >= 4.5, words
        steps = [contrast(colors[f"dop{number}"], colors["panel"]) for number in range(1, 7)]
        assert steps == sorted(steps)  # the more instances, the more it stands out


def test_every_color_of_the_page_is_used() -> None:
    scripts = "".join(part.read_text() for part in PAGE.iterdir() if part.name != "style.css")
    rules = PAGE.joinpath("style.css").read_text()
    for name in schemes()[0]:
        is_used = f"var(--{name})" in rules or f'"{name}"' in scripts
        assert is_used or (name.startswith("dop") and "`dop${" in scripts), name


async def test_every_part_of_the_page_is_served_and_asks_nobody_else(serving: Serving) -> None:
    names = [part.name for part in files("loong.server.dashboard").joinpath("page").iterdir()]
    async with serving(ScriptedEngine(), source()) as url, httpx.AsyncClient(timeout=30) as client:
        page = await client.get(f"{url}/dashboard")
        parts = {name: await client.get(f"{url}/dashboard/page/{name}") for name in names}
        missing = await client.get(f"{url}/dashboard/page/nothing.js")
    assert page.text == parts["index.html"].text
    assert missing.status_code == 404
    for name, part in parts.items():
        assert part.status_code == 200, name
        assert "://" not in part.text, name
        assert "default-src 'self'" in part.headers["Content-Security-Policy"]


async def test_the_page_has_its_own_files_and_no_others(serving: Serving, tmp_path: Path) -> None:
    secret = tmp_path / "secret.html"
    secret.write_text("secret")
    names = ("../" * 20 + str(secret)[1:], str(secret), "../page/main.js", "n" * 300 + ".js", "\0.js")
    async with serving(ScriptedEngine(), source()) as url, httpx.AsyncClient(timeout=30) as client:
        for name in names:
            answer = await client.get(f"{url}/dashboard/page/{quote(name, safe='')}")
            assert answer.status_code == 404, name


async def test_what_goes_on_and_on_has_no_head(serving: Serving) -> None:
    async with serving(ScriptedEngine(), source()) as url, httpx.AsyncClient(timeout=30) as client:
        assert (await client.head(f"{url}/dashboard/events")).status_code == 405


async def test_numbers_of_batches_have_an_end(serving: Serving) -> None:
    async with serving(ScriptedEngine(), source()) as url:
        assert (await get_json(url, f"/dashboard/batches/{'9' * 5000}"))["error"]["code"] == "not_found"


async def test_the_page_is_open_and_what_it_shows_is_not(serving: Serving) -> None:
    dashboard = source()
    engine = ScriptedEngine(cluster=two_requests(dashboard))
    async with serving(engine, dashboard, api_keys=("k",)) as url, httpx.AsyncClient(timeout=30) as client:
        for path in ("", "/page/main.js"):
            assert (await client.get(f"{url}/dashboard{path}")).status_code == 200
        for path in ("/events", "/requests/r000", "/batches/1", "/page/../events"):
            assert (await client.get(f"{url}/dashboard{path}")).status_code == 401
        assert len(await first(url, 2, Authorization="Bearer k")) == 2


async def test_a_server_without_a_dashboard_has_none(serving: Serving) -> None:
    async with serving(ScriptedEngine()) as url, httpx.AsyncClient(timeout=30) as client:
        assert (await client.get(f"{url}/dashboard")).status_code == 404
