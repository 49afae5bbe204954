"""A server writes one timeline of all its workers."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.request import Request, urlopen

import httpx
from served import served


def test_a_trace_reports_what_every_worker_did_and_where_it_began(tmp_path: Path) -> None:
    arguments = ("--num-instances", "2", "--policy", "static-sp", "--trace-dir", "traces")
    with served(tmp_path, *arguments) as server:
        post(f"{server.url}/start_profile")
        server.client.completions.create(
            model="loong-tiny", prompt=[5] * 40, max_tokens=5, extra_body={"ignore_eos": True}
        )
        written = Path(post(f"{server.url}/stop_profile")["trace"])
        post(f"{server.url}/start_profile")  # a second trace begins anew
        again = Path(post(f"{server.url}/stop_profile")["trace"])
    events = json.loads((tmp_path / written).read_text())["traceEvents"]
    for instance_id in range(2):
        pids = {
            event["pid"]
            for event in events
            if event.get("name") == "process_name"
            and event["args"]["name"].startswith(f"instance {instance_id}")
        }
        names = [event["name"] for event in events if event.get("pid") in pids and event["ph"] == "X"]
        assert {"step", "attention", "exchange", "ring step", "linear"} <= set(names)
        assert names.count("step") == 5
    assert not any(
        event.get("name") == "step" for event in json.loads((tmp_path / again).read_text())["traceEvents"]
    )


def test_a_trace_has_what_an_instance_served(tmp_path: Path) -> None:
    """Under `infinite` a prompt larger than one instance borrows room, and is read there by its decodes."""
    arguments = ("--num-instances", "2", "--policy", "infinite", "--kv-cache-tokens", "64")
    with served(tmp_path, *arguments, "--trace-dir", "traces") as server:
        post(f"{server.url}/start_profile")
        server.client.completions.create(
            model="loong-tiny", prompt=[5] * 80, max_tokens=5, extra_body={"ignore_eos": True}
        )
        written = Path(post(f"{server.url}/stop_profile")["trace"])
    names = [event.get("name") for event in json.loads((tmp_path / written).read_text())["traceEvents"]]
    assert "served step" in names


def test_a_trace_begins_and_ends_while_a_lease_goes_on(tmp_path: Path) -> None:
    with served(tmp_path, "--num-instances", "2", "--trace-dir", "traces") as server:
        stream = server.client.completions.create(
            model="loong-tiny",
            prompt=[5] * 40,
            max_tokens=100_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        tokens = iter(stream)
        next(tokens)
        post(f"{server.url}/start_profile")
        target = server.metric("vllm:generation_tokens_total") + 100  # some had been computed before
        while server.metric("vllm:generation_tokens_total") < target:
            next(tokens)
        written = Path(post(f"{server.url}/stop_profile")["trace"])
        assert server.metric("vllm:num_requests_running") == 1, "the trace ended with the request"
        stream.close()
    names = [event.get("name") for event in json.loads((tmp_path / written).read_text())["traceEvents"]]
    assert names.count("step") > 0


def test_a_short_trace_has_steps_of_all_workers_that_were_at_work(tmp_path: Path) -> None:
    """It begins when all have begun, which takes a profiler a second the first time."""
    arguments = ("--num-instances", "2", "--policy", "static-sp", "--trace-dir", "traces")
    with served(tmp_path, *arguments) as server:
        stream = server.client.completions.create(
            model="loong-tiny",
            prompt=[5] * 40,
            max_tokens=20_000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        post(f"{server.url}/start_profile")
        refused = httpx.post(f"{server.url}/start_profile", timeout=60)
        assert (refused.status_code, "/stop_profile" in refused.text) == (400, True)
        time.sleep(0.5)  # the trace itself: nothing else is waited for
        written = Path(post(f"{server.url}/stop_profile")["trace"])
        refused = httpx.post(f"{server.url}/stop_profile", timeout=60)
        assert (refused.status_code, "/start_profile" in refused.text) == (400, True)
        stream.close()
    events = json.loads((tmp_path / written).read_text())["traceEvents"]
    pids = {event["pid"] for event in events if event.get("name") == "step"}
    assert len(pids) == 2


def post(url: str) -> Mapping[str, str]:
    with urlopen(Request(url, method="POST"), timeout=60) as answer:
        reported: Mapping[str, str] = json.load(answer)
    return reported
