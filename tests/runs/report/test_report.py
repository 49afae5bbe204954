"""The page of a run: self-contained, with every number, and written to the folder of its pictures."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_documents import LOOSE, RULE, run_row, sweep, write_run

from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.runs.report.report import report_folder
from loong.server.metrics.trace import chrome_trace

VOID = {"meta", "br", "img", "link", "input", "hr"}
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


class Page(HTMLParser):
    """Notes what a page refers to, its ids and its words, and holds it to closing what it opens."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                self.references.append(value or "")
            elif name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        """Its words with single spaces."""
        return re.sub(r"\s+", " ", " ".join(self.words))


def page_of(folder: Path) -> Page:
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def history() -> ClusterHistory:
    held = ((0, 10), (1, 20))
    batch = BatchSlice(1, ESPGroup((0, 1)), Phase.PREFILL, 2.0, 4.0, ("a",), held, held, 900, 900)
    return ClusterHistory((batch,), (), {0: 100, 1: 100})


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single")
    (folder / "trace-esp.json").write_bytes(chrome_trace(history()))
    write_run(folder, [run_row("esp", trace="trace-esp.json"), run_row("static-sp", 2.0, trace="gone.json")])
    report_folder(folder)
    return folder


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swept")
    sweep(folder)
    report_folder(folder)
    return folder


@pytest.mark.parametrize("name", ["single", "swept"])
def test_a_page_is_well_formed_and_refers_to_nothing_outside(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(name)
    page = page_of(folder)
    assert page.references
    beside = {reference for reference in page.references if not reference.startswith("#")}
    assert beside <= {path.name for path in folder.glob("interactive*.html")}
    assert len(page.ids) == len(set(page.ids))
    assert {reference.removeprefix("#") for reference in page.references} - beside <= set(page.ids)
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= NAMESPACES
    assert not re.search(r"@import|url\((?!#)", text)


@pytest.mark.parametrize("name", ["single", "swept"])
def test_a_page_has_every_number_of_its_runs(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    text = page_of(folder).text
    for run in json.loads((folder / "results.json").read_bytes())["runs"]:
        for part in (run, *run["by_prompt_length"]):
            for key, value in part.items():
                if isinstance(value, float):
                    assert f"{key} {value:.6g}" in text


def test_a_page_begins_with_the_answer_and_reports_how_it_was_found(single: Path) -> None:
    text = page_of(single).text
    answer = text.index("At 2 req/s, esp met the SLO for 75 % of 4 requests, static-sp for 50 %.")
    assert answer < text.index("Numbers") < text.index("Losses of esp") < text.index("How to have these")
    for words in (
        "Measured on real servers.",
        "loong bench --workload '<mixed & more>'",
        "0123abc",
        "a processor",
        "TTFT <= max(5 x unloaded prefill, 1 s), TPOT <= 50 ms",
        "seconds 0.5, fit linear 0.25",
        "static-sp: one fixed group of all instances",
        "rates 2, inf",
    ):
        assert words in text
    assert "1 of 4 requests of esp failed at 2 req/s" in text


def test_a_count_over_all_repetitions_is_called_so(single: Path, swept: Path) -> None:
    assert "prompt tokens sent met the SLO" in page_of(single).text
    assert "prompt tokens sent in all repetitions met the SLO" in page_of(swept).text


def test_pictures_are_in_the_page_and_beside_it(single: Path, swept: Path) -> None:
    text = page_of(single).text
    for words in (
        "DoP 2: prompt of 900 tokens",
        "time since the first request (s)",
        "TTFT by length of prompt",
        "before scaling by 1/64",
        "0.0625",  # a tick, with all its digits
    ):
        assert words in text
    for name in ("timeline", "ttft-by-length", "attainment-by-scale", "latency-cdf"):
        assert (single / f"{name}.png").is_file()
        assert (single / f"{name}.svg").is_file()
    assert "SLO attainment against rate" in page_of(swept).text
    for name in ("attainment-by-rate", "goodput", "pareto", "latency-by-rate"):
        assert (swept / f"{name}.png").is_file()
    assert not (swept / "timeline.png").exists()


def test_words_in_pictures_take_the_color_of_the_page(single: Path) -> None:
    text = (single / "report.html").read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text
    assert "currentColor" in text
    assert "fill: #1f2328" not in text


def test_each_rule_has_an_answer_and_pictures_of_its_own(tmp_path: Path) -> None:
    rules = {"tight": RULE, "absolute": LOOSE, "never-run": "never-run (TTFT <= 1 ms)"}
    slos = [{"name": name, "description": description} for name, description in rules.items()]
    rows = [run_row("esp"), run_row("tp", 2.0), run_row("esp", slo=LOOSE), run_row("tp", 2.0, slo=LOOSE)]
    write_run(tmp_path, rows, slos=slos)
    written = report_folder(tmp_path)
    text = page_of(tmp_path).text
    assert "Under the SLO rule tight" in text
    assert "Under the SLO rule absolute" in text
    assert "The SLO absolute asks for TTFT <= 9000 ms." in text
    assert "never-run" not in text
    assert tmp_path / "ttft-by-length-2.svg" in written
    assert all(path.is_file() for path in written)


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    write_run(tmp_path, [run_row("esp"), run_row("tp", is_cut_off=True, attains=False)])
    report_folder(tmp_path)
    assert "1 of 2 runs were ended as soon as too many requests had missed" in page_of(tmp_path).text


def test_a_policy_that_planned_by_a_wrong_model_is_named(tmp_path: Path) -> None:
    rows = [
        run_row("esp", cost_model_errors={"decode": 1.5, "prefill": 0.1}),
        run_row("tp", cost_model_errors={"decode": 0.9}),
    ]
    write_run(tmp_path, rows)
    report_folder(tmp_path)
    text = page_of(tmp_path).text
    assert "the times that plans of esp counted on were off" in text
    assert "decode batches by a factor of 2.5" in text
    assert "plans of tp" not in text


def test_a_machine_that_did_background_load_is_reported_with_what_it_means(tmp_path: Path) -> None:
    write_run(tmp_path, [run_row("esp", cpu_share_of_others=0.62), run_row("tp", cpu_share_of_others=0.02)])
    report_folder(tmp_path)
    text = page_of(tmp_path).text
    assert "62 % while esp was measured and 2 % while tp was" in text
    assert "which is best may be another on an idle machine" in text


def test_repetitions_are_reported_with_their_range(swept: Path) -> None:
    text = page_of(swept).text
    assert "Numbers are medians of 2 repetitions" in text
    assert re.search(r"\d ms \([\d.]+ ms to [\d.]+ ms\)", text)


@pytest.mark.parametrize(("model", "is_named"), [("loong-tiny", True), ("./my-llama", False), (None, False)])
def test_a_report_of_the_tiny_model_ends_with_how_to_talk_to_a_real_one(
    model: str | None, is_named: bool, tmp_path: Path
) -> None:
    write_run(tmp_path, [run_row("esp")], configuration={"workload": "mixed", "model": model})
    report_folder(tmp_path)
    assert page_of(tmp_path).text.rstrip().endswith("make chat") == is_named
