"""A server's decision log explains what its clients saw, and its event log is planned again."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from served import served, wait_until

from loong.launcher.cli import main
from loong.observability.decision_log.lines import ArrivedLine, StartedLine
from loong.observability.decision_log.reader import read_log

POOL = 128


@dataclass(frozen=True)
class Run:
    """Two requests, one after the other, of which the first needs two instances."""

    decision_log: Path
    event_log: Path
    begin: float
    end: float
    request_ids: Sequence[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return that of a server which has ended."""
    folder = tmp_path_factory.mktemp("logs")
    arguments = ("--num-instances", "2", "--kv-cache-tokens", str(POOL), "--calibration-time", "1")
    logs = ("--decision-log", "decisions.jsonl", "--event-log", "events.jsonl", "--event-log-prompts")
    with served(folder, *arguments, *logs) as server:
        client = server.client
        client.models.list()  # what a first request needs is there from now on
        begin = time.time()
        answers = [
            client.completions.create(
                model="loong-tiny",
                prompt=[5 + i % 90 for i in range(num_tokens)],
                max_tokens=20,
                extra_body={"ignore_eos": True},
            )
            for num_tokens in (POOL + 40, 10)
        ]
        end = time.time()
        decisions = folder / "decisions.jsonl"
        wait_until(
            lambda: decisions.read_bytes().count(b'"line":"batch_ended"') > 2, 60, "the log to be seen"
        )
        assert server.stop() == 0
    return Run(decisions, folder / "events.jsonl", begin, end, [answer.id for answer in answers])


def test_the_log_of_real_workers_explains_a_request_that_needed_several(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    started, *lines = read_log(run.decision_log)
    assert isinstance(started, StartedLine)
    assert started.clock_start is not None
    arrivals = [line.time + started.clock_start for line in lines if isinstance(line, ArrivedLine)]
    assert run.begin < arrivals[0] < arrivals[1] < run.end
    assert main(["explain", str(run.decision_log), "--json"]) == 0
    summaries = {r["request_id"]: r for r in json.loads(capsys.readouterr().out)["requests"]}
    assert summaries.keys() == set(run.request_ids)
    for summary in summaries.values():
        assert summary["num_output_tokens"] == 20
        assert 0 < summary["ttft"]["seconds"] < summary["ended_at"] - summary["arrived_at"]
    assert main(["explain", str(run.decision_log), "--request", run.request_ids[0]]) == 0
    text = capsys.readouterr().out
    assert f"Prefill of {POOL + 40} tokens (0 to {POOL + 39})" in text
    assert "on instances 0 and 1 (DoP 2 of 2 idle)" in text
    assert "It ends with 20 tokens, all that it may have." in text


def test_the_recording_of_real_workers_is_replayed_plan_by_plan(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--replay", str(run.event_log)]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
