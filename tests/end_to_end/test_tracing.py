"""A server writes one timeline of all its workers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import httpx
import pytest
from served import Served, served


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    arguments = ("--num-instances", "2", "--policy", "static-sp", "--trace-dir", "traces")
    with served(tmp_path_factory.mktemp("tracing"), *arguments) as running:
        yield running


def test_a_trace_reports_what_every_worker_did_and_where_it_began(server: Served) -> None:
    post(f"{server.url}/start_profile")
    server.client.completions.create(
        model="loong-tiny", prompt=[5] * 40, max_tokens=5, extra_body={"ignore_eos": True}
    )
    events = events_of_trace(server)
    post(f"{server.url}/start_profile")  # a second trace begins anew
    assert not any(event.get("name") == "step" for event in events_of_trace(server))
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


def test_a_trace_has_what_an_instance_served(tmp_path: Path) -> None:
    """Under `infinite` a prompt larger than one instance borrows room, and is read there by its decodes."""
    arguments = ("--num-instances", "2", "--policy", "infinite", "--kv-cache-tokens", "64")
    with served(tmp_path, *arguments, "--trace-dir", "traces") as server:
        post(f"{server.url}/start_profile")
        server.client.completions.create(
            model="loong-tiny", prompt=[5] * 80, max_tokens=5, extra_body={"ignore_eos": True}
        )
        assert "served step" in [event.get("name") for event in events_of_trace(server)]


def test_a_trace_begins_and_ends_while_a_lease_goes_on_and_has_steps_of_all_its_workers(
    server: Served,
) -> None:
    """It begins when all have begun, which takes a profiler a second the first time."""
    stream = server.client.completions.create(
        model="loong-tiny",
        prompt=[5] * 40,
        max_tokens=20_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    tokens = iter(stream)
    next(tokens)
    post(f"{server.url}/start_profile")
    refused = httpx.post(f"{server.url}/start_profile", timeout=60)
    assert (refused.status_code, "/stop_profile" in refused.text) == (400, True)
    target = server.metric("vllm:generation_tokens_total") + 50  # some had been computed before
    while server.metric("vllm:generation_tokens_total") < target:
        next(tokens)
    events = events_of_trace(server)
    assert server.metric("vllm:num_requests_running") == 1, "the trace ended with the request"
    refused = httpx.post(f"{server.url}/stop_profile", timeout=60)
    assert (refused.status_code, "/start_profile" in refused.text) == (400, True)
    stream.close()
    assert len({event["pid"] for event in events if event.get("name") == "step"}) == 2


def events_of_trace(server: Served) -> Sequence[Mapping[str, Any]]:
    """End a trace and return its events."""
    written = Path(post(f"{server.url}/stop_profile")["trace"])
    events: Sequence[Mapping[str, Any]] = json.loads((server.log_path.parent / written).read_text())[
        "traceEvents"
    ]
    return events


def post(url: str) -> Mapping[str, str]:
    with urlopen(Request(url, method="POST"), timeout=60) as answer:
        reported: Mapping[str, str] = json.load(answer)
    return reported
