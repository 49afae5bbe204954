import argparse
import json
from pathlib import Path

import pytest

from loong.core.errors import ConfigError
from loong.launcher import workload
from loong.workloads.workload import make_workload


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="loong")
    workload.add_parser(parser.add_subparsers())
    args = parser.parse_args(["workload", *arguments])
    code: int = args.run(args)
    return code


def test_a_workload_is_described_in_tables_and_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("describe", "shared-prefix@constant(2)", "--num-requests", "101", "--seed", "3") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "Workload: shared-prefix@constant(2) (lengths from built-in distributions, scale 1, seed 3)\n"
        "101 requests in 50.0 s, 2 a second\n"
    )
    for word in ("input tokens", "output tokens", "seconds between", "P99.9", "32-128k", "% shared", "users"):
        assert word in printed
    reported = json.loads(printed.splitlines()[-1])
    sent = make_workload("shared-prefix@constant(2)", 101, seed=3)
    assert reported["workload"] == "shared-prefix@constant(2)"
    assert reported["num_users"] == 10
    assert reported["gap"]["mean"] == 0.5
    assert reported["num_kv_tokens"] == sum(r.num_prompt_tokens + r.num_output_tokens - 1 for r in sent)


def test_what_has_no_pace_comes_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("describe", "fixed(100,10)", "--num-requests", "5", "--length-scale", "1/10") == 0
    printed = capsys.readouterr().out
    assert "5 requests all at once" in printed
    assert json.loads(printed.splitlines()[-1])["input"]["mean"] == 10.0


def test_a_closed_loop_does_not_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("describe", "fixed(100,10)@closed(64)", "--num-requests", "5") == 0
    assert "5 requests at most 64 at once\n" in capsys.readouterr().out


def test_a_rate_wins_over_the_spec(capsys: pytest.CaptureFixture[str]) -> None:
    run("describe", "mixed@poisson(1)", "--num-requests", "11", "--request-rate", "4", "--burstiness", "inf")
    assert "11 requests in 2.5 s, 4 a second" in capsys.readouterr().out


def test_histograms_are_drawn_if_asked_for(tmp_path: Path) -> None:
    assert run("describe", "mixed@poisson(2)", "--num-requests", "30", "--plot", str(tmp_path / "a.png")) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_saved_requests_are_sent_again_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "requests.jsonl"
    assert run("save", "leval@gamma(2,0.5)", "--num-requests", "30", "--seed", "2", "-o", str(file)) == 0
    assert capsys.readouterr().out == f"Wrote 30 requests to {file}\n"
    assert make_workload(f"trace:{file}", 30, seed=8) == make_workload("leval@gamma(2,0.5)", 30, seed=2)
    assert run("describe", f"trace:{file}") == 0
    printed = capsys.readouterr().out
    assert f"(lengths from {file}, scale 1, seed 0)\n30 requests in" in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["describe", "nonsense"], "workload 'nonsense', character 1"),
        (["describe", "trace:nowhere.csv"], "nowhere.csv cannot be read"),
        (["describe", "mixed", "--seed", "-1"], "--seed -1"),
        (["describe", "mixed", "--num-requests", "3", "--plot", "/dev/null/a.png"], "--plot /dev/null/a.png"),
        (["describe", "mixed", "--num-requests", "3", "--plot", "a.nothing"], "--plot a.nothing"),
        (["save", "mixed", "-o", "/dev/null/a.jsonl"], "--output /dev/null/a.jsonl cannot be written"),
    ],
)
def test_bad_input_gives_one_clear_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        run(*arguments)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)
    assert not capsys.readouterr().out


def test_more_requests_than_a_file_has_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    run("save", "fixed(9)", "--num-requests", "3", "-o", str(file))
    with pytest.raises(ConfigError, match="--num-requests 4 is more than the 3"):
        run("describe", f"trace:{file}", "--num-requests", "4")
