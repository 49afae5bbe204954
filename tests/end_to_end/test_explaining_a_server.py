"""A server's decision log explains what its clients saw."""

import json
import time
from pathlib import Path

import pytest
from served import served, wait_until

from loong.launcher.cli import main
from loong.observability.decision_log.lines import ArrivedLine, StartedLine
from loong.observability.decision_log.reader import read_log

POOL = 128


def test_the_log_of_real_workers_explains_a_request_that_needed_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--num-instances", "2", "--kv-cache-tokens", str(POOL), "--decision-log", "decisions.jsonl")
    log = tmp_path / "decisions.jsonl"
    with served(tmp_path, *arguments) as server:
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
        wait_until(lambda: log.read_bytes().count(b'"line":"batch_ended"') > 2, 60, "the log to be seen")
    started, *lines = read_log(log)
    assert isinstance(started, StartedLine)
    assert started.clock_start is not None
    arrivals = [line.time + started.clock_start for line in lines if isinstance(line, ArrivedLine)]
    assert begin < arrivals[0] < arrivals[1] < end
    assert main(["explain", str(log), "--json"]) == 0
    summaries = {r["request_id"]: r for r in json.loads(capsys.readouterr().out)["requests"]}
    assert summaries.keys() == {answer.id for answer in answers}
    for summary in summaries.values():
        assert summary["num_output_tokens"] == 20
        assert 0 < summary["ttft"]["seconds"] < summary["ended_at"] - summary["arrived_at"]
    assert main(["explain", str(log), "--request", answers[0].id]) == 0
    text = capsys.readouterr().out
    assert f"Prefill of {POOL + 40} tokens (0 to {POOL + 39})" in text
    assert "on instances 0 and 1 (DoP 2 of 2 idle)" in text
    assert "It ends with 20 tokens, all that it may have." in text
