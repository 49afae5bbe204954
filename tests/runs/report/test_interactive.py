"""The page to zoom into: it holds what was recorded, is whole by itself, and lets nothing else in."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from eventful_run import eventful_run

from loong.core.cluster_history import BatchSlice, ClusterHistory, RequestSpan
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.observability.decision_log.reader import read_log
from loong.observability.decision_log.story.index import indexed
from loong.runs.report.interactive import MAX_BARS, interactive_page
from loong.runs.report.logged_history import history_of_log
from loong.runs.report.watched import WatchedRun
from loong.workloads.report.timeline_cells import Work

pytest.importorskip("plotly")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="runs">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    eventful_run(path)
    return path


def test_each_bar_is_a_recorded_step_and_leads_to_its_requests(log: Path) -> None:
    history = history_of_log(log)
    (policy,) = data_of(interactive_page({"esp": WatchedRun.of(history)}, "a run"))["policies"]
    ids = [request["id"] for request in policy["requests"]]
    shown = [
        (b["id"], b["group"], b["phase"], b["start"], b["end"], [ids[index] for index in b["requests"]])
        for b in policy["batches"]
    ]
    assert shown == [
        (
            batch.batch_id,
            sorted(batch.group.instance_ids),
            batch.phase,
            pytest.approx(batch.started_at, abs=1e-6),
            pytest.approx(batch.ended_at, abs=1e-6),
            list(batch.request_ids),
        )
        for batch in history.batches
    ]


def test_requests_have_the_stories_of_explain(log: Path) -> None:
    run = WatchedRun.of(history_of_log(log), index=indexed(read_log(log)))
    (policy,) = data_of(interactive_page({"esp": run}, "a run"))["policies"]
    assert policy["requests"]
    assert all(request["story"][0][1][0].startswith("It comes") for request in policy["requests"])


def test_colors_are_those_of_the_other_pictures(log: Path) -> None:
    colors = data_of(interactive_page({"esp": WatchedRun.of(history_of_log(log))}, "a run"))["colors"]
    assert colors == {"long": Work.LONG.value, "short": Work.SHORT.value, "decode": Work.DECODE.value}


def test_the_page_may_ask_no_network_and_what_clients_send_stays_data(log: Path) -> None:
    name = "</script><script>alert(1)</script>"
    batch = BatchSlice(1, ESPGroup((0,)), Phase.PREFILL, 0.0, 1.0, (name,), ())
    history = ClusterHistory((batch,), requests=(RequestSpan(name, 9, 0.0, 1.0),))
    page = interactive_page({name: WatchedRun.of(history)}, name)
    assert "default-src 'none'" in page
    assert name not in page
    assert data_of(page)["policies"][0]["requests"][0]["id"] == name
    assert not re.search(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=", page)


def test_a_run_of_too_many_bars_is_shown_to_a_time_that_the_page_names() -> None:
    batches = tuple(
        BatchSlice(i, ESPGroup((0, 1)), Phase.DECODE, float(i), i + 1.0, ("a",), ()) for i in range(MAX_BARS)
    )
    page = interactive_page({"esp": WatchedRun.of(ClusterHistory(batches))}, "a run")
    (policy,) = data_of(page)["policies"]
    assert 2 * len(policy["batches"]) <= MAX_BARS
    assert f"the first {MAX_BARS // 2:,.1f} of {MAX_BARS:,.1f} s" in page


def test_names_are_no_tags_where_the_library_knows_tags(log: Path) -> None:
    name = '<a href="https://example.com">\x1besp</a>'
    (policy,) = data_of(interactive_page({name: WatchedRun.of(history_of_log(log))}, "a run"))["policies"]
    assert policy["name"] == name
    assert policy["label"] == "&lt;a href=&quot;https://example.com&quot;&gt;\\u001besp&lt;/a&gt;"
