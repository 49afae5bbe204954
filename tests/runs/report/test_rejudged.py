import json
from pathlib import Path

import msgspec
import pytest
from run_documents import run_row, write_run

from loong.core.errors import ConfigError
from loong.launcher.cli import main
from loong.runs.report.rejudged import rejudged
from loong.workloads.metrics.slo import parse_slo
from loong.workloads.report.run_document import RunDocument, SLOText, by_rule, merged

LENGTHS = {"requested_input_lens": [10, 20, 40, 9_000], "e2els": [0.01, 0.1, 0.2, None]}
PROBE = {"seconds": [0.1], "fit": {"constant": 0.001, "linear": 0.0001, "quadratic": 0.0}}


def document(folder: Path, *factors: float, **fields: object) -> RunDocument:
    rows = [
        run_row(policy, factor, request_rate=rate, **LENGTHS)
        for policy in ("esp", "tp")
        for rate, factor in enumerate(factors, 1)
    ]
    return write_run(folder, rows, **{"prefill_probe": PROBE, **fields})


def test_requests_are_held_to_the_bounds_of_the_other_rule(tmp_path: Path) -> None:
    judged = rejudged([document(tmp_path, 1.0)], [parse_slo("ttft:20 tpot:4.5")])[0]
    before, after = by_rule(judged)
    assert after.rule.name == "absolute"
    assert [run.slo_ratios for run in after.runs] == [(0.5, 1.0, 2.0, None)] * 2
    assert [run.number("slo_attainment") for run in after.runs] == [0.5, 0.5]
    assert [run.number("request_goodput") for run in after.runs] == [2 / 12.5] * 2
    assert [run.attains for run in after.runs] == [True, True]
    assert [run.slo_ratios for run in before.runs] == [(0.25, 0.5, 1.0, None)] * 2
    assert after.runs[0].ttfts == before.runs[0].ttfts


def test_ranges_of_lengths_are_judged_too(tmp_path: Path) -> None:
    judged = rejudged([document(tmp_path, 1.0)], [parse_slo("ttft:20")])[0]
    bucket = by_rule(judged)[1].runs[0].by_prompt_length[0]
    assert bucket["slo_attainment"] == 2 / 3  # 9,000 tokens were of another length before they were scaled
    assert bucket["sent"] == 4


def test_bounds_that_depend_on_prefills_are_those_of_the_first_probe(tmp_path: Path) -> None:
    with_probe = document(tmp_path / "a", 1.0)
    without = document(tmp_path / "b", 2.0, prefill_probe=None)
    rule = parse_slo("loongserve-12", scale=0.001)  # 15 ms, or 25 us x (1 + 0.1 x tokens)
    judged = rejudged([with_probe, without], [rule])
    ratios = [by_rule(found)[1].runs[0].slo_ratios[0] for found in judged]
    assert ratios == pytest.approx([10 / 15, 20 / 15])


def test_goodputs_of_a_sweep_are_found_anew(tmp_path: Path) -> None:
    reported = {"slo": run_row("esp")["slo"], "request_rate": 3.0}
    goodput = [{"policy": policy, **reported} for policy in ("esp", "tp")]
    swept = document(tmp_path, 1.0, 2.0, 4.0, goodput=goodput)
    after = by_rule(rejudged([swept], [parse_slo("ttft:40 tpot:9000")])[0])[1]
    assert [(g.policy, g.request_rate, g.too_high_rate) for g in after.goodput] == [
        ("esp", 2.0, 3.0),
        ("tp", 2.0, 3.0),
    ]


def test_a_rule_that_runs_were_made_under_stays_as_it_is(tmp_path: Path) -> None:
    found = document(tmp_path, 1.0)
    description = parse_slo("tight").describe()
    assert found.slos[0].description == description
    assert rejudged([found], [parse_slo("tight")]) == [found]


def test_rules_that_documents_cannot_report_are_refused(tmp_path: Path) -> None:
    found = document(tmp_path, 1.0, prefill_probe=None)
    with pytest.raises(ConfigError, match="loongserve-12 depends on unloaded prefills, and no run"):
        rejudged([found], [parse_slo("loongserve-12")])
    with pytest.raises(ConfigError, match="loongserve-10-mixed judges the means of a run"):
        rejudged([found], [parse_slo("loongserve-10-mixed")])


def test_plot_draws_both_and_says_which_was_planned_for(tmp_path: Path) -> None:
    document(tmp_path, 1.0)
    assert main(["plot", str(tmp_path), "--slo", "ttft:20 tpot:4.5"]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "Under the SLO rule absolute" in text
    assert "Runs under tight, for which policies planned, are judged again here" in text
    assert (tmp_path / "attainment-by-scale-2.svg").is_file()
    assert len(json.loads((tmp_path / "results.json").read_text())["slos"]) == 1


def test_runs_of_several_folders_are_reported_to_be_judged_again_if_only_some_are(tmp_path: Path) -> None:
    first, second = document(tmp_path / "a", 1.0), document(tmp_path / "b", 2.0)
    rule = parse_slo("ttft:20")
    (judged,) = rejudged([first], [rule])
    made_so = msgspec.structs.replace(second, slos=(SLOText(rule.name, rule.describe()),))
    for documents in ([judged, made_so], [made_so, judged]):
        found = merged(documents)
        assert found is not None
        assert {text.name: text.planned_for for text in found.slos} == {"tight": None, rule.name: "tight"}
