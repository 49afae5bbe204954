import json
from math import inf
from pathlib import Path

import pytest
from run_documents import LOOSE, RULE, run_row, sweep, write_run

from loong.core.errors import ConfigError
from loong.workloads.report.run_document import (
    as_simulated,
    by_rule,
    measured,
    merged,
    read_document,
    spread_of,
)


def test_runs_are_read_with_all_their_numbers(tmp_path: Path) -> None:
    document = write_run(tmp_path, [run_row("esp", trace={"file": "trace-esp.json", "after": 1.5})])
    (run,) = document.runs
    assert (run.policy, run.request_rate, run.num_prompts, run.ttfts[0]) == ("esp", 2.0, 4, 0.01)
    assert run.number("p99_ttft_ms") == 23.25
    assert run.number("no_such_number") is None
    assert run.trace is not None
    assert (run.trace.file, run.trace.after) == ("trace-esp.json", 1.5)


def test_a_trace_may_be_named_by_its_file_alone(tmp_path: Path) -> None:
    (run,) = write_run(tmp_path, [run_row("esp", trace="trace-esp.json")]).runs
    assert run.trace is not None
    assert (run.trace.file, run.trace.after) == ("trace-esp.json", None)


def test_all_at_once_is_an_infinite_rate(tmp_path: Path) -> None:
    (runs,) = by_rule(write_run(tmp_path, [run_row("esp", request_rate="inf")]))
    assert runs.rates == [inf]
    assert runs.shown_rate == inf


def test_repetitions_are_a_median_and_a_range(tmp_path: Path) -> None:
    repeats = [run_row("esp", factor, repeat=i) for i, factor in enumerate((1.0, 3.0, 2.0))]
    (runs,) = by_rule(write_run(tmp_path, repeats))
    assert runs.spread("esp", 2.0, "mean_ttft_ms") == (46.5, 23.25, 69.75)
    assert runs.spread("tp", 2.0, "mean_ttft_ms") is None
    assert spread_of([None, 4.0, 2.0]) == (3.0, 2.0, 4.0)


def test_the_rate_that_is_shown_is_the_highest_that_some_policy_attains(tmp_path: Path) -> None:
    (runs,) = by_rule(sweep(tmp_path))
    assert runs.policies == ["esp", "static-sp"]
    assert runs.shown_rate == 4.0
    none = [run_row("esp", 9.0, request_rate=rate) for rate in (2.0, 1.0)]
    (runs,) = by_rule(write_run(tmp_path, none))
    assert runs.shown_rate == 1.0


def test_runs_that_were_cut_off_are_not_shown(tmp_path: Path) -> None:
    cut = run_row("esp", request_rate=4.0, is_cut_off=True, attains=False)
    (runs,) = by_rule(write_run(tmp_path, [run_row("esp"), cut]))
    assert runs.at("esp", 4.0) == []
    assert runs.shown_rate == 2.0


def test_each_rule_has_its_runs(tmp_path: Path) -> None:
    slos = [{"name": "tight", "description": RULE}, {"name": "absolute", "description": LOOSE}]
    document = write_run(tmp_path, [run_row("esp"), run_row("tp", slo=LOOSE)], slos=slos)
    assert [runs.policies for runs in by_rule(document)] == [["esp"], ["tp"]]


def test_simulated_runs_are_marked_beside_measured_ones(tmp_path: Path) -> None:
    on_servers = write_run(tmp_path / "a", [run_row("esp")])
    virtual = write_run(tmp_path / "b", [run_row("esp")], kind="simulate", command="loong simulate")
    both = merged([as_simulated(on_servers), as_simulated(virtual)])
    assert both is not None
    assert [run.policy for run in both.runs] == ["esp", "esp (simulated)"]
    assert both.command.splitlines() == [on_servers.command, "loong simulate"]
    assert both.kind == "bench and simulate"
    (runs,) = by_rule(both)
    assert measured(runs).policies == ["esp"]
    (alone,) = by_rule(as_simulated(virtual))
    assert measured(alone).policies == ["esp (simulated)"]


def test_what_differs_between_machines_is_reported_each(tmp_path: Path) -> None:
    machine = {"processor": "another", "num_cores": "2", "git_commit": "0123abc"}
    both = merged([write_run(tmp_path, [run_row("esp")]), write_run(tmp_path, [], machine=machine)])
    assert both is not None
    assert both.machine["processor of run 2"] == "another"
    assert "num_cores of run 2" not in both.machine
    assert merged([]) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no document of a run"),
        ("[]", "names no schema_version"),
        (json.dumps({"schema_version": 99}), "schema version 99, and this loong reads 1"),
        (json.dumps({"schema_version": 1}), "missing required field"),
    ],
)
def test_what_is_no_document_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as refusal:
        read_document(path)
    assert str(path) in str(refusal.value)


def test_a_document_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_document(tmp_path / "results.json")
