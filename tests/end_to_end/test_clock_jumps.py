"""A wall clock that jumps, by a year in both directions, changes no answer and loses no instance."""

import os
from pathlib import Path

import httpx
from served import served, wait_until

JUMPS = """
import itertools, sys, time

_true, _true_ns, _jumps = time.time, time.time_ns, itertools.cycle((0, 31536000, -31536000))
time.time = lambda: _true() + next(_jumps)
time.time_ns = lambda: _true_ns() + next(_jumps) * 10**9
print("jumping", file=sys.stderr, flush=True)
"""
NUM_REQUESTS = 20


def test_a_server_whose_wall_clock_jumps_answers_the_same_and_replaces_lost_workers(tmp_path: Path) -> None:
    """All of its processes call the same clock, which is another one each time."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(JUMPS)
    path = os.pathsep.join(filter(None, (str(tmp_path / "site"), os.environ.get("PYTHONPATH"))))
    flags = (
        "--num-instances",
        "2",
        "--api-server-count",
        "2",
        "--allow-fault-injection",
        "--dtype",
        "float32",
    )
    logs = ("--decision-log", "decisions.jsonl", "--event-log", "events.jsonl", "--event-log-prompts")
    with served(tmp_path, *flags, *logs, environment={"PYTHONPATH": path}) as server:
        assert server.log.count("jumping") >= 2

        def answer() -> tuple[str, int]:
            body = {"prompt": "once", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
            found = (
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).raise_for_status().json()
            )
            return found["choices"][0]["text"], found["created"]

        texts, times = zip(*(answer() for _ in range(NUM_REQUESTS)), strict=True)
        assert len(set(texts)) == 1
        assert max(times) - min(times) > 10_000_000, "the clock did not jump"
        assert server.metric("loong:instance_losses_total") == 0
        httpx.post(f"{server.url}/admin/faults", json={"fault": "kill"}, timeout=60).raise_for_status()
        wait_until(lambda: server.metric("loong:instance_joins_total") == 1, 120, "the lost one to join")
        assert answer()[0] == texts[0]
        assert server.metric("loong:instance_losses_total") == 1
