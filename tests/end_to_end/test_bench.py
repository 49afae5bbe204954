"""The promises of `loong bench`, on real servers: groups of many sizes, measured, drawn, and nothing left."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from served import wait_until

from loong.core.group_changes import GroupChange
from loong.observability.decision_log.reader import read_log
from loong.observability.decision_log.story.index import indexed
from loong.runs.spawned_server import ENTRY
from loong.workloads.distributions.scalings import scalings_of
from loong.workloads.report.timeline import parse_trace

MARK = "LOONG_TEST_BENCH"  # in the environment of a benchmark and of all that it starts
SHORT = ("--length-scale", "1/64", "--output-scale", "1/64")  # prompts and answers
LOAD = ("--workload", "mixed", *SHORT, "--request-rate", "inf", "--num-warmups", "0")
RELAXED = ("--goodput", "ttft:60000")
# The longest of these prompts need all four pools, others two or three, and many share one; small chunks let
# a prompt that began on few instances go on with more. At once, they would all run on one group of four.
ELASTIC = ("--seed", "2", "--num-requests", "30", "--num-instances", "4", "--request-rate", "10")
SMALL = "--extra-server-args=--calibration-time 0 --kv-cache-tokens 1792 --max-num-batched-tokens 128"


@contextmanager
def benchmark(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a benchmark that writes into `folder`, by which its processes can be found."""
    command = [sys.executable, "-c", ENTRY, "bench", *LOAD, *RELAXED, *arguments, "--output-dir", str(folder)]
    environment = {**os.environ, MARK: str(folder)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.terminate()


def processes_of(folder: Path) -> list[int]:
    """Return the processes of a benchmark, however they were started."""
    mark = f"{MARK}={folder}".encode()
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if mark in _environment(p)]


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    runs = json.loads((folder / "results.json").read_text())["runs"]
    return {run["policy"]: run for run in runs}


def dops_of(run: dict[str, Any]) -> set[int]:
    return {int(dop) for dop, num_batches in run["num_batches_by_dop"].items() if num_batches}


def assert_all_requests_are_in_trace_and_log(folder: Path, run: dict[str, Any]) -> None:
    """Check that the records of client, trace and decision log are of the same requests."""
    history = parse_trace((folder / run["trace"]).read_bytes())
    index = indexed(read_log(folder / run["decision_log"]))
    assert set(run["request_ids"]) == {span.request_id for span in history.requests}
    assert set(run["request_ids"]) <= index.arrivals.keys()
    assert set(run["request_ids"]) == {name for batch in history.batches for name in batch.request_ids}
    changes = Counter(scaling.change for scaling in scalings_of(history))
    assert changes[GroupChange.GREW] == run["num_scale_ups"]
    assert changes[GroupChange.SHRANK] == run["num_scale_downs"]
    assert changes[GroupChange.HANDED_OVER] == run["num_hand_overs"]


def test_elastic_groups_change_and_records_of_all_sides_agree(tmp_path: Path) -> None:
    with benchmark(tmp_path, *ELASTIC, SMALL, "--policy", "esp") as process:
        wait_until(lambda: len(processes_of(tmp_path)) >= 6, 60, "benchmark, server and four workers")
        printed, errors = process.communicate()
    assert process.returncode == 0, errors
    assert processes_of(tmp_path) == []
    run = results_of(tmp_path)["esp"]
    assert (run["num_prompts"], run["completed"], run["failed"]) == (30, 30, 0)
    assert len(dops_of(run)) >= 2
    assert_all_requests_are_in_trace_and_log(tmp_path, run)
    assert "as <code>loong explain</code> tells them" in (tmp_path / "report.html").read_text()
    assert run["num_scale_ups"] + run["num_hand_overs"] > 0
    assert json.loads(printed.splitlines()[-1])["runs"].keys() == {"esp"}
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "esp" in (tmp_path / "timeline.svg").read_text()


def test_tensor_parallelism_is_measured_with_all_processes_and_kv_in_one_instance(tmp_path: Path) -> None:
    flags = (
        "--num-requests",
        "6",
        "--num-instances",
        "2",
        "--extra-server-args=--calibration-time 0 --kv-cache-tokens 4k",
    )
    with benchmark(tmp_path, *flags, "--policy", "tp") as process:
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    run = results_of(tmp_path)["tp"]
    assert run["completed"] == 6
    assert dops_of(run) == {1}
    assert (run["server"]["num_instances"], run["server"]["tensor_parallel_size"]) == (1, 2)
    assert "KV room for 8,000 tokens" in (tmp_path / "server-tp.log").read_text()
