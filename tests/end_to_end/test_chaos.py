"""`loong chaos` against `loong serve`: workers are killed under load, and no token is lost or changed."""

import json
import signal
from pathlib import Path

from chaos_runs import chaos_run
from served import HASTY_ENTRY, HASTY_HEARTBEAT, served

from loong.executor.heartbeats import MAX_MISSED

MAX_SILENCE = MAX_MISSED * HASTY_HEARTBEAT  # seconds


def test_no_token_is_lost_or_changed_while_workers_are_killed(tmp_path: Path) -> None:
    with served(tmp_path, "--num-instances", "3", "--allow-fault-injection") as server:
        with chaos_run(server.url, "--kill", "1/2s", "--duration", "4s") as run:
            output, errors = run.communicate(timeout=300)
        assert run.returncode == 0, output + errors + server.log
        report = json.loads(output.splitlines()[-1])
        assert report["is_whole"]
        assert report["num_complete_requests"] == report["num_requests"] > 0
        assert report["num_tokens"] > 0
        assert report["num_instance_losses"] == report["num_instance_joins"] == len(report["faults"]) > 0
        assert report["health"] == "ok"

        with chaos_run(server.url, "--kill", "1/1s", "--duration", "1h") as run:
            assert run.stderr is not None
            assert any("kill of instance" in line for line in iter(run.stderr.readline, ""))
            run.send_signal(signal.SIGINT)
            output, errors = run.communicate(timeout=120)
        assert run.returncode == 130, output + errors
        interrupted = json.loads(output.splitlines()[-1])
        assert interrupted["is_interrupted"]
        assert interrupted["faults"]


def test_no_token_is_lost_or_changed_while_a_worker_is_stopped_for_too_long(tmp_path: Path) -> None:
    pause = ("--pause", "1/3s", "--pause-time", f"{3 * MAX_SILENCE}s", "--duration", "3s")
    with (
        served(tmp_path, "--num-instances", "3", "--allow-fault-injection", entry=HASTY_ENTRY) as server,
        chaos_run(server.url, *pause) as run,
    ):
        output, errors = run.communicate(timeout=300)
        assert run.returncode == 0, output + errors + server.log
        report = json.loads(output.splitlines()[-1])
        assert [fault["kind"] for fault in report["faults"]] == ["pause"]
        assert report["num_complete_requests"] == report["num_requests"]
        assert report["num_instance_losses"] > 0
        assert f"was lost: it was silent for {MAX_SILENCE:g} s" in server.log
