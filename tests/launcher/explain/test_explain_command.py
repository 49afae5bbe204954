"""The command: its output, and one clear line for each error."""

import json
import os
import re
from pathlib import Path

import pytest
from decision_logs import EventReporter, logged, prefill_two, reported
from eventful_run import LATE, LONG, SHORT, eventful_run
from run_documents import run_row, write_run
from simulation import instances_with, timed_request

from loong.core.events import InstanceLost, RequestAborted
from loong.core.plan import IterationPlan, Preemption
from loong.launcher.cli import main
from loong.launcher.explain.listing import beginnings
from loong.observability.decision_log.lines import PlannedLine
from loong.observability.decision_log.log import decision_log
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import Coefficients, WorkCostModel
from loong.scheduler.policy import make_policy

DOCUMENT = (Path(__file__).parents[3] / "docs" / "decision-log.md").read_text()


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


def test_it_says_what_requests_waited_for_and_who_waited_longest(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, path)
    assert text.splitlines()[:6] == [
        f"3 requests, from {path}",
        "",
        "1 of 1 request with targets missed one (!): 0 to the first token, 1 between tokens.",
        "They waited 365 ms in all, between batches too:",
        "  365 ms  batches of others ran, and the policy gave no reason",
        "",
    ]
    words = " ".join(text.split())
    for row, why in (
        (
            "r002 0.030 s 296 ms 279 ms 36.7 ms 50 4 1 ",
            "Having waited 219 ms, it starts as batch 6 ends. It rests once before a batch, 77.0 ms in all,",
        ),
        (
            "r001 0.020 s 69.0 ms 366 ms 33.3 ms ! 600 30 1-3 preempted once, 300 tokens moved ",
            "It rests once before a batch, 49.0 ms in all. Having waited 20.0 ms, it starts as batch 1 ends.",
        ),
        ("r000 0.000 s 0 ms 40.0 ms 11.0 ms 90 20 1-3 ", "Its steps took 249 ms, 4% more than predicted. "),
    ):
        assert row + why in words
    assert max(map(len, text.splitlines()[:-1])) <= 110
    assert text.splitlines()[-1] == f"One request in full: loong explain {path} --request r002"


def rows_of_all(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """Return the rows of the table of all requests."""
    lines = shown(capsys, *arguments, "--all").splitlines()
    heading = next(number for number, line in enumerate(lines) if line.startswith("request "))
    return lines[heading + 1 :]


def test_the_list_of_all_has_a_line_a_request_most_delayed_first(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of_all(capsys, path)
    assert [row.split()[0] for row in rows] == [LATE, LONG, SHORT]
    cells = "r001 0.020 s 69.0 ms 366 ms 33.3 ms ! 600 30 1-3 preempted once, 300 tokens moved"
    assert " ".join(rows[1].split()) == cells


def test_a_policy_says_what_most_requests_wait_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    requests = [timed_request(n, 3000, 40, 0.001 * n) for n in range(30)]
    policy = make_policy("esp", PolicyConfig(target_ttft=0.5))
    logged(log, policy, instances_with([20_000] * 2), requests, cost_model=WorkCostModel())
    lines = shown(capsys, log).splitlines()
    (waited,) = (n for n, line in enumerate(lines) if line.startswith("They waited "))
    assert any("full of more urgent prompts" in line for line in lines[waited + 1 : waited + 6])
    assert "The 10 that waited longest, each with its reasons:" in lines
    assert sum(line.startswith("    For ") for line in lines) == 10
    assert lines[-1] == f"All requests: loong explain {log} --all"
    assert len(rows_of_all(capsys, log)) == 30
    assert len(json.loads(shown(capsys, log, "--json"))["requests"]) == 30


@pytest.mark.parametrize("name", ["infinite", "infinite-paper", "distkv"])
def test_it_says_who_lent_what_to_whom_since_when_and_why(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, cost_model = tmp_path / "log", WorkCostModel(Coefficients(decode_key=20e-6))
    requests = [
        timed_request(n, size, 200, at) for n, (size, at) in enumerate([(2000, 0), (1000, 0), (2850, 0.1)])
    ]
    lines = logged(
        log, make_policy(name, PolicyConfig()), instances_with([4000] * 2), requests, cost_model=cost_model
    )
    moved = [m for line in lines if isinstance(line, PlannedLine) for m in line.migrations]
    assert moved
    text = shown(capsys, log)
    loans = json.loads(shown(capsys, log, "--json"))["loans"]
    assert sum(loan["num_lent_tokens"] + loan["num_returned_tokens"] for loan in loans) == sum(
        m.num_tokens for m in moved
    )
    first = loans[0]
    who = f"instance {first['creditor_id']} to {first['debtor_id']} since {first['since']:.3f} s: "
    assert who in text
    assert first["reason"] in " ".join(text.split())
    story = shown(capsys, log, "--request", first["request_ids"][0])
    assert "The policy on lent room: " in story


def test_ids_are_as_short_as_they_are_unique() -> None:
    ids = ["cmpl-0123456789abcdef", "cmpl-0123456789abcxyz", "cmpl-5", "cmpl-9999999999999999", "cmpl-5-1"]
    names = beginnings(ids)
    assert names == {
        "cmpl-0123456789abcdef": "cmpl-0123456789abcd",
        "cmpl-0123456789abcxyz": "cmpl-0123456789abcx",
        "cmpl-5": "cmpl-5",
        "cmpl-5-1": "cmpl-5-1",
        "cmpl-9999999999999999": "cmpl-999999999",
    }
    assert beginnings(["a"]) == {"a": "a"}


def test_the_list_reports_what_went_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.plan(2.0, IterationPlan(preemptions=(Preemption("r000"), Preemption("r001"))))

    reported(tmp_path / "log", instances_with([20] * 3), script)
    assert "2 requests, of which no targets are known." in shown(capsys, tmp_path / "log")
    rows = rows_of_all(capsys, tmp_path / "log")
    assert [row.split(maxsplit=10)[-1] for row in rows] == ["preempted once, not over"] * 2


def test_the_list_reports_who_lost_kv_and_who_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(reporter: EventReporter) -> None:
        prefill_two(reporter)
        reporter.report(InstanceLost(2.0, 1, "it was silent"))
        reporter.report(RequestAborted(3.0, "r001"))

    reported(tmp_path / "log", instances_with([20] * 3), script)
    rows = {row.split()[0]: row for row in rows_of_all(capsys, tmp_path / "log")}
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
    for text in (shown(capsys, log_path, *which), shown(capsys, log_path)):
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


def test_without_a_name_the_first_policy_of_the_newest_run_is_reported(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reported_by_name = shown(capsys, path)
    assert shown(capsys) == reported_by_name.replace(str(path), path.name)
    esp, baseline = (path.with_name(f"decisions-{policy}.jsonl") for policy in ("esp", "static-sp"))
    for other in (esp, baseline):
        other.write_bytes(path.read_bytes())
        os.utime(other, ns=(2 * path.stat().st_mtime_ns,) * 2)
    of_both = [
        run_row("esp", decision_log=esp.name, request_ids=[LATE, SHORT, ""]),
        run_row("static-sp", decision_log=baseline.name, request_ids=[]),
    ]
    write_run(path.parent, of_both)
    lines = shown(capsys).splitlines()
    assert lines[:3] == [
        "2 requests of policy esp, from decisions-esp.jsonl",
        "Left out: 1 request of the warm-up and the probe.",
        "Also there: --policy static-sp, log.jsonl",
    ]
    assert not any(line.startswith(LONG) for line in lines)
    assert lines[-1] == "All requests: loong explain decisions-esp.jsonl --all"
    assert shown(capsys, path.parent).splitlines()[0] == f"2 requests of policy esp, from {esp}"
    assert shown(capsys, "--policy", "static-sp").startswith("3 requests of policy static-sp, from ")
    assert json.loads(shown(capsys, "--json"))["policy"] == "esp"
    assert refused(capsys, "--policy", "tp").endswith(
        "has no decision log of --policy tp; it has esp, static-sp"
    )
    assert "is a log itself" in refused(capsys, path, "--policy", "esp")
    (path.parent / "results.json").unlink()
    assert shown(capsys, "--policy", "esp").startswith("3 requests, from decisions-esp.jsonl")
    for log in (path, esp, baseline):
        log.unlink()
    assert "`loong bench` makes one for each policy" in refused(capsys)


def test_targets_of_the_server_are_those_of_requests_without_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with decision_log(
        tmp_path / "log", policy="esp", targets_of=lambda num_tokens: (num_tokens / 8, 0.05)
    ) as log:
        prefill_two(EventReporter(log, instances_with([20] * 3)))
    requests = json.loads(shown(capsys, tmp_path / "log", "--json"))["requests"]
    assert {r["request_id"]: (r["ttft"]["slo"], r["ttft"]["is_late"]) for r in requests} == {
        "r000": (0.75, True),
        "r001": (0.75, True),
    }
    assert "2 of 2 requests with targets missed one (!): 2 to the first token" in shown(
        capsys, tmp_path / "log"
    )
