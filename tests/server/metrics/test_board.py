"""The queries of a board's panels, answered from a server's metrics before and after some requests."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import promql_parser as ast
import pytest
from http_answers import post
from listening import BESIDE_ITS_ENGINE
from prometheus_client.parser import text_string_to_metric_families
from promql import Scrapes
from scripted_engine import ScriptedEngine, Serving

from loong.observability.decision_log.recent import RecentLines
from loong.observability.decision_log.runs import RequestRuns
from loong.server.metrics.request_observers import RequestObservers, Targets

SECONDS = 10.0  # that the two are taken to be apart

HISTOGRAMS = ("e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds")


async def scrapes(serving: Serving) -> Scrapes:
    """Return three requests of 5 prompt tokens (one begins it) and 8 of output each, between the two."""
    async with serving(ScriptedEngine()) as url, httpx.AsyncClient(timeout=30) as client:
        await post(url, "/v1/completions", prompt="abcd", max_tokens=8)
        before = (await client.get(f"{url}/metrics")).text
        for _ in range(3):
            await post(url, "/v1/completions", prompt="abcd", max_tokens=8)
        return Scrapes(before, (await client.get(f"{url}/metrics")).text, SECONDS)


def only(values: dict[frozenset[tuple[str, str]], float]) -> float:
    (value,) = values.values()
    return value


@BESIDE_ITS_ENGINE
async def test_rates_and_increases_are_of_what_was_asked(serving: Serving) -> None:
    reported = await scrapes(serving)
    of_model = '{model_name="tiny"}'
    assert only(reported.answer(f"rate(vllm:prompt_tokens_total{of_model}[1m])")) == 3 * 5 / SECONDS
    assert only(reported.answer(f"rate(vllm:generation_tokens_total{of_model}[1m])")) == 3 * 8 / SECONDS
    ended = reported.answer(f"sum by(finished_reason) (increase(vllm:request_success_total{of_model}[1m]))")
    assert ended == {frozenset({("finished_reason", "length")}): 3}
    lengths = reported.answer(f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{of_model}[1m]))")
    assert max(lengths.values()) == 3
    assert lengths[frozenset({("le", "2.0")})] == 0
    assert lengths[frozenset({("le", "5.0")})] == 3


@BESIDE_ITS_ENGINE
@pytest.mark.parametrize("name", HISTOGRAMS)
async def test_quantiles_and_means_are_within_what_happened(serving: Serving, name: str) -> None:
    reported = await scrapes(serving)
    series = f"vllm:{name}"
    mean = only(
        reported.answer(
            f'rate({series}_sum{{model_name="tiny"}}[1m]) / rate({series}_count{{model_name="tiny"}}[1m])'
        )
    )
    assert 0 < mean < 30
    quantiles = [
        only(reported.answer(f"histogram_quantile({share}, sum by(le) (rate({series}_bucket[1m])))"))
        for share in (0.5, 0.9, 0.99)
    ]
    assert quantiles == sorted(quantiles)
    assert all(math.isfinite(value) for value in quantiles)


@BESIDE_ITS_ENGINE
async def test_another_models_series_are_not_reported(serving: Serving) -> None:
    reported = await scrapes(serving)
    for query in (
        'vllm:num_requests_running{model_name="other"}',
        'vllm:kv_cache_usage_perc{model_name!="tiny"}',
    ):
        assert reported.answer(query) == {}
    assert only(reported.answer('vllm:num_requests_running{model_name=~"ti.+"}')) == 0


BOARD = json.loads((Path(__file__).parents[3] / "docs" / "examples" / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Return the queries of the board of docs/examples, with values for Grafana's variables."""
    exprs = [target["expr"] for panel in PANELS for target in panel["targets"]]
    return [expr.replace("$__rate_interval", "1m").replace("$model_name", "tiny") for expr in exprs]


def nodes_of(node: ast.Expr) -> Iterator[ast.Expr]:
    """Yield a query and all of its parts."""
    yield node
    match node:
        case ast.ParenExpr() | ast.AggregateExpr():
            yield from nodes_of(node.expr)
        case ast.Call():
            for argument in node.args:
                yield from nodes_of(argument)
        case ast.BinaryExpr():
            yield from nodes_of(node.lhs)
            yield from nodes_of(node.rhs)
        case ast.MatrixSelector():
            yield node.vector_selector
        case _:
            pass


async def test_the_board_of_the_repository_asks_for_series_and_labels_that_there_are(
    serving: Serving,
) -> None:
    targets = Targets(1.0, 0.05)
    observers = RequestObservers(
        "esp", RecentLines(), RequestRuns(), lambda: {"decode": 0.1}, lambda _: targets
    )
    async with serving(ScriptedEngine(), observers) as url, httpx.AsyncClient(timeout=30) as client:
        await post(url, "/v1/completions", prompt="abcd", max_tokens=8)
        await post(url, "/v1/completions", prompt="abcd", max_tokens=-8)
        families = [*text_string_to_metric_families((await client.get(f"{url}/metrics")).text)]
    labels: dict[str, set[str]] = {}
    for family in families:
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        for ending in endings:
            labels[family.name + ending] = set()
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for query in queries():
        parts = [*nodes_of(ast.parse(query))]
        selectors = [part for part in parts if isinstance(part, ast.VectorSelector)]
        assert selectors, query
        for selector in selectors:
            assert selector.name in labels, query
            asked = {matcher.name for matcher in selector.matchers.matchers}
            for part in parts:
                if isinstance(part, ast.AggregateExpr) and part.modifier is not None:
                    asked.update(part.modifier.labels)
            if known := labels[selector.name]:  # none of a counter that nothing has counted yet
                assert asked <= known, query


async def test_the_board_has_answers_on_a_server_that_was_asked(serving: Serving) -> None:
    reported = await scrapes(serving)
    answered = [query for query in queries() if reported.answer(query)]
    assert len(answered) > len(queries()) / 2


def test_panels_of_the_board_do_not_overlap_and_each_says_what_it_shows() -> None:
    places = set[tuple[int, int]]()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= own
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert all(target["legendFormat"] for panel in PANELS for target in panel["targets"])
    (source, model) = BOARD["templating"]["list"]
    assert (source["type"], model["query"]) == (
        "datasource",
        "label_values(vllm:num_requests_running, model_name)",
    )
