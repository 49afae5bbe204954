"""The command: its output, and one clear line for each error."""

import json
import re
from pathlib import Path

import pytest
from decision_logs import EventReporter, prefill_two, reported
from eventful_run import LATE, LONG, SHORT, eventful_run
from run_documents import run_row, write_run
from simulation import instances_with

from loong.core.events import InstanceLost, RequestAborted
from loong.core.plan import IterationPlan, Preemption
from loong.launcher.cli import main
from loong.observability.decision_log.log import decision_log

DOCUMENT = (Path(__file__).parents[3] / "docs" / "decisions.md").read_text()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the log of the eventful run."""
    path = tmp_path / "log.jsonl"
    eventful_run(path)
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the output of `loong explain`."""
    assert main(["explain", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_list_has_a_line_a_request_most_delayed_first(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heading, _, columns, *rows = shown(capsys, path).splitlines()
    assert heading == (
        "3 requests, most delayed first; waits between batches count. "
        "1 of 1 request with an SLO missed it (!)."
    )
    assert columns.split() == [
        "request",
        "came",
        "waited",
        "TTFT",
        "TPOT",
        "prompt",
        "output",
        "DoP",
        "notes",
    ]
    assert [row.split()[0] for row in rows] == [LATE, LONG, SHORT]
    cells = "r001 0.020 s 69.0 ms 366 ms 33.3 ms ! 600 30 1-3 preempted once, 300 tokens moved"
    assert " ".join(rows[1].split()) == cells
    assert rows[2].split()[-3:] == ["90", "20", "1-3"]


def test_the_list_reports_what_went_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.plan(2.0, IterationPlan(preemptions=(Preemption("r000"), Preemption("r001"))))

    reported(tmp_path / "log", instances_with([20] * 3), script)
    heading, _, _, *rows = shown(capsys, tmp_path / "log").splitlines()
    assert heading == "2 requests, most delayed first; waits between batches count."
    assert [row.split(maxsplit=10)[-1] for row in rows] == ["preempted once, not over"] * 2


def test_the_list_reports_who_lost_kv_and_who_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.report(InstanceLost(2.0, 1, "it was silent"))
        reporter.report(RequestAborted(3.0, "r001"))

    reported(tmp_path / "log", instances_with([20] * 3), script)
    rows = {row.split()[0]: row for row in shown(capsys, tmp_path / "log").splitlines()[3:]}
    assert rows["r000"].endswith("lost KV once, not over")
    assert rows["r001"].endswith(" abort")


def test_programs_get_one_object(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = json.loads(shown(capsys, path, "--json"))["requests"]
    assert [request["request_id"] for request in requests] == [LATE, LONG, SHORT]
    assert requests[1]["tpot"]["is_late"] is True
    story = json.loads(shown(capsys, path, "--json", "--request", LONG))
    assert story["summary"] == requests[1]
    steps = [step["step"] for step in story["steps"]]
    assert steps == ["wait", "run", "run", "first_token", "run", "move", "run", "drop", "run", "run", "end"]
    assert [part["num_tokens"] for part in story["steps"][1]["parts"]] == [200, 200]


def test_a_story_is_no_wider_than_the_page(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, path, "--request", LONG).splitlines()
    assert lines[0] == f"Request {LONG}: a prompt of 600 tokens, at most 30 tokens of output."
    assert max(map(len, lines)) <= 110


def test_the_commands_of_the_documentation_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    simulate, explain = re.findall(r"^loong (simulate .*|explain .*--request r.*)$", DOCUMENT, re.MULTILINE)
    assert main(simulate.split()) == 0
    capsys.readouterr()
    _, log_path, *which = explain.split()
    for text in (shown(capsys, log_path, *which), *shown(capsys, log_path).splitlines()[:7]):
        assert text in DOCUMENT


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the one line of an error."""
    assert main(["explain", *map(str, arguments)]) == 1
    output = capsys.readouterr()
    assert not output.out
    (line,) = output.err.splitlines()
    return line


def test_a_request_that_is_not_in_the_log_is_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"loong: error: {path} has 3 requests, but not 'r9'; without --request it lists them"
    assert refused(capsys, path, "--request", "r9") == expected


def test_the_beginning_of_an_id_stands_for_it_if_no_other_begins_so(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text().replace(f'"{LONG}"', '"cmpl-1f3a"')
    path.write_text(text)
    assert shown(capsys, path, "--request", "cmpl-1").startswith("Request cmpl-1f3a: ")
    path.write_text(text.replace(f'"{SHORT}"', '"cmpl-1"'))
    assert shown(capsys, path, "--request", "cmpl-1").startswith("Request cmpl-1: ")
    assert refused(capsys, path, "--request", "cmpl") == (
        "loong: error: --request cmpl is how 2 ids begin: cmpl-1, cmpl-1f3a"
    )


def test_a_damaged_line_is_one_line_with_its_number(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_bytes(path.read_bytes().replace(b'"planned"', b'"planed"', 1))
    assert f"{path}:3 is damaged" in refused(capsys, path)


def test_a_log_without_requests_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with decision_log(tmp_path / "log"):
        pass
    assert refused(capsys, tmp_path / "log").endswith("has no request: none has arrived")
    (tmp_path / "log").write_bytes(b"")
    assert refused(capsys, tmp_path / "log").endswith("is empty")


def test_without_a_name_the_newest_log_is_reported(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reported_by_name = shown(capsys, path)
    assert main(["explain"]) == 0
    output = capsys.readouterr()
    assert output.out == reported_by_name
    assert output.err == f"Of {path.name}:\n"
    others = [path.with_name(f"decisions-{policy}.jsonl") for policy in ("esp", "tp")]
    for other in others:
        other.write_bytes(path.read_bytes())
    write_run(path.parent, [run_row("tp", num_prompts=2, decision_log=others[1].name), run_row("esp")])
    assert main(["explain"]) == 0
    assert capsys.readouterr().err == (
        "Of decisions-tp.jsonl, of which 2 requests were to be measured; other logs there: "
        "decisions-esp.jsonl, log.jsonl:\n"
    )
    for log in (path, *others):
        log.unlink()
    assert main(["explain"]) == 1
    assert "`loong bench` makes one for each policy" in capsys.readouterr().err
