import json
import sys
from html import escape
from pathlib import Path
from xml.dom.minidom import parseString

import msgspec
import pytest
from eventful_run import eventful_run
from run_documents import RULE, run_row, write_run
from shared_files import shared_files

from loong.core.errors import ConfigError
from loong.launcher.cli import main
from loong.runs.report.logged_history import history_of_log
from loong.workloads.plots.style import MAX_NAME_LETTERS, drawable
from loong.workloads.report.timeline import parse_trace


def plot(*arguments: str | Path) -> int:
    return main(["plot", *map(str, arguments)])


def test_a_folder_gets_its_pictures_and_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, [run_row("esp"), run_row("tp", 2.0)])
    assert plot(tmp_path) == 0
    assert (tmp_path / "report.html").is_file()
    assert str(tmp_path / "latency-cdf.svg") in capsys.readouterr().err


def test_runs_of_several_folders_are_one_report(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [run_row("esp")])
    write_run(tmp_path / "b", [run_row("tp", 2.0)])
    assert plot(tmp_path / "a", tmp_path / "b" / "results.json", "--output-dir", tmp_path / "both") == 0
    assert "esp met the SLO for 75 %" in (tmp_path / "both" / "report.html").read_text()
    assert not (tmp_path / "a" / "report.html").exists()


def test_a_decision_log_becomes_a_picture_and_a_trace_with_growth_and_moves(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    eventful_run(log)
    (tmp_path / "out").mkdir()
    assert plot(log, "--output-dir", tmp_path / "out", "--window", "0:0.5") == 0
    assert not shared_files(tmp_path / "out")
    trace = (tmp_path / "out" / "trace-decisions.json").read_bytes()
    history = parse_trace(trace)
    assert {batch.group.dop for batch in history.batches} == {1, 2, 3}
    assert [b.batch_id for b in history.batches] == [b.batch_id for b in history_of_log(log).batches]
    assert any(event["ph"] == "s" for event in json.loads(trace)["traceEvents"])
    assert "DoP 3" in (tmp_path / "out" / "timeline-window.svg").read_text()
    assert "What ran: decisions" in (tmp_path / "out" / "report.html").read_text()


def test_a_trace_is_drawn_alone(tmp_path: Path) -> None:
    log = tmp_path / "decisions.jsonl"
    eventful_run(log)
    plot(log, "--output-dir", tmp_path / "one")
    assert plot(tmp_path / "one" / "trace-decisions.json", "--output-dir", tmp_path / "two") == 0
    first, second = ((tmp_path / name / "timeline.svg").read_text() for name in ("one", "two"))
    assert first == second
    assert not (tmp_path / "two" / "trace-decisions.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-run"], "cannot read no-such-run"),
        (["."], ". has no results.json; name an --output-dir"),
        (["a", "b"], "2 runs are given; say with --output-dir"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot(*arguments) == 1
    assert words in capsys.readouterr().err


def test_a_file_that_only_looks_like_a_trace_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": [1]}')
    assert plot(tmp_path / "trace.json", "--output-dir", tmp_path / "out") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'trace.json'} is no trace of loong" in line


@pytest.mark.parametrize("window", ["3", "6:3", "a:b", "-1:2"])
def test_a_window_that_is_none_is_refused(window: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plot("run", f"--window={window}")
    assert "is no range of seconds; write 3:6" in capsys.readouterr().err


def test_without_a_name_the_newest_run_is_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plot() == 1
    assert "no run in this folder; `loong bench` or `loong simulate` makes one" in capsys.readouterr().err
    flags = ["--workload", "leval", "--rate", "5", "--num-requests", "9", "--policy", "tp"]
    with monkeypatch.context() as without_pictures:
        without_pictures.setitem(sys.modules, "matplotlib", None)
        assert main(["simulate", *flags]) == 0
    report = Path("loong-runs/simulate-1/report.html")
    assert not report.exists()
    assert plot() == 0
    assert report.is_file()


HOSTILE = (
    "$\\frac{$",
    "_hidden",
    "a\x1b[31m\x00",
    "<script>x</script>",
    "y" * 5000,
    "日本",
    '" id="x" url(#',
    "",
)


def test_policies_may_have_any_names(tmp_path: Path) -> None:
    runs = [
        run_row(name, request_rate=rate, e2els=[1.0, 1.0, 1.0, None], requested_input_lens=[9] * 4)
        for name in HOSTILE
        for rate in (1.0, 2.0)
    ]
    write_run(
        tmp_path, runs, goodput=[{"policy": name, "slo": RULE, "request_rate": 2.0} for name in HOSTILE]
    )
    assert plot(tmp_path) == 0
    pictures = list(tmp_path.glob("*.svg"))
    assert len(pictures) == 7
    for path in pictures:
        svg = path.read_text()
        parseString(svg)  # a browser shows nothing of one that is not well-formed
        assert all(escape(drawable(name, MAX_NAME_LETTERS), quote=False) in svg for name in HOSTILE)
    assert "<script>" not in (tmp_path / "report.html").read_text()


def test_a_log_may_have_any_name_and_its_texts_any_letters(tmp_path: Path) -> None:
    log = tmp_path / "$\\frac{$ \x1b[31m.jsonl"
    request_id = "$\\frac{$ \x1b[31m <b>"
    eventful_run(log)
    log.write_bytes(log.read_bytes().replace(b'"r001"', msgspec.json.encode(request_id)))
    assert plot(log, "--output-dir", tmp_path / "out") == 0
    for path in (tmp_path / "out").glob("*.svg"):
        parseString(path.read_text())
    assert "<b>" not in (tmp_path / "out" / "report.html").read_text()


def test_a_document_that_is_nested_too_deeply_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in (
        b'{"schema_version": 1, "configuration": ' + b"[" * 100_000,
        b'{"traceEvents": [{"a": ' * 50_000,
    ):
        (tmp_path / "results.json").write_bytes(text)
        assert plot(tmp_path) == 1
        assert "maximum recursion depth exceeded" in capsys.readouterr().err


def test_a_run_whose_columns_differ_in_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="its requests have 3 to 4 values each"):
        write_run(tmp_path, [run_row("esp", tpots=[None, 0.004, 0.005])])
