"""A server's event log is planned again, on a machine without its workers."""

from pathlib import Path

import pytest
from served import served

from loong.launcher.cli import main

POOL = 1024


def test_the_recording_of_real_workers_is_replayed_plan_by_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--num-instances", "2", "--kv-cache-tokens", str(POOL), "--calibration-time", "1")
    log = tmp_path / "events.jsonl"
    with served(tmp_path, *arguments, "--event-log", log.name) as server:
        for num_tokens in (POOL + 40, 10):
            server.client.completions.create(
                model="loong-tiny",
                prompt=[5 + i % 90 for i in range(num_tokens)],
                max_tokens=20,
                extra_body={"ignore_eos": True},
            )
        server.stop()
    assert main(["simulate", "--replay", str(log)]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
