"""One real server of two engines and two API processes, whose engines and workers are killed under load."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from child_processes import with_descendants
from prometheus_client.parser import text_string_to_metric_families
from requests_for_tests import expected
from served import Served, assert_gone, served, wait_until

from loong.model.tiny import tiny_model

HEADERS = {"Authorization": "Bearer operators-key"}
FLAGS = (
    *("--num-instances", "4", "--num-engines", "2", "--api-server-count", "2", "--dtype", "float32"),
    *("--kv-cache-tokens", "4000", "--max-instances", "6", "--allow-fault-injection"),
    *("--admin-key", "operators-key", "--served-model-name", "loong-tiny"),
)
PROMPT = tuple(5 + 7 * i % 90 for i in range(100))
NUM_TOKENS = 160
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "prompt": PROMPT[::-1], "prompt_logprobs": 1, "stream": False},
    {"temperature": 1.2, "seed": 5, "n": 3, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 6, "guided_regex": "([a-f]{3}|[0-9]){160}", "ignore_eos": False},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("engines"), str(folder), *FLAGS) as running:
        yield running
        processes = with_descendants(running.process.pid)
        assert running.stop() == 0, running.log
    assert len(processes) > 8
    assert_gone(processes)


@pytest.fixture(autouse=True)
def _all_serve(server: Served) -> Iterator[None]:
    yield
    wait_until(lambda: server.health().get("status") == "ok", 60, "all engines to serve")


def choices_of(server: Served, fields: dict[str, Any], on_event: Any = None) -> list[Any]:
    """Return the choices of an answer, or of all events of a stream."""
    body = {
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        **fields,
    }
    choices: list[Any] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith(("data: {", "{")):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                choices += event["choices"]
                if on_event is not None:
                    on_event(len(choices))
    return choices


def by_choice(choices: list[Any]) -> dict[int, tuple[list[int], list[str], int]]:
    """Return for each choice its tokens, those with log probabilities, and the number of scored prompts."""
    found: dict[int, tuple[list[int], list[str], int]] = {}
    for choice in choices:
        token_ids, scored, num_prompts = found.get(choice["index"], ([], [], 0))
        token_ids = token_ids + choice["token_ids"]
        scored = scored + (choice["logprobs"] or {"tokens": []})["tokens"]
        found[choice["index"]] = token_ids, scored, num_prompts + bool(choice.get("prompt_logprobs"))
    return found


def inject(server: Served, **fault: object) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/admin/faults", json=fault, headers=HEADERS, timeout=30)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def test_streams_go_on_with_the_same_tokens_when_one_engine_and_then_all_die(
    server: Served, folder: Path
) -> None:
    undisturbed = [by_choice(choices_of(server, way)) for way in WAYS]
    tokens, scored, _ = undisturbed[0][0]
    assert tokens == expected(folder, PROMPT, NUM_TOKENS)[0]
    assert len(scored) == NUM_TOKENS
    assert undisturbed[1][0][2] == 1
    before = server.metric("loong:requests_taken_over_total")

    def kill(num_events: int) -> None:
        if num_events != 20:
            return
        assert inject(server, fault="kill_engine", engine=1) == {"fault": "kill_engine", "engine": 1}
        wait_until(lambda: server.health()["status"] == "degraded", 30, "the loss to be seen")
        assert server.health()["engines"]["1"]["status"] == "restarting"
        assert "engine 1 was lost" in server.health()["message"]
        inject(server, fault="kill_engine", engine=0)

    ways = [*WAYS, WAYS[0]]
    with ThreadPoolExecutor(len(ways)) as pool:
        streams = [pool.submit(choices_of, server, way, kill if way is WAYS[2] else None) for way in ways]
        disturbed = [by_choice(stream.result()) for stream in streams]
    assert disturbed == [*undisturbed, undisturbed[0]]
    assert server.metric("loong:requests_taken_over_total") > before


def test_a_conversation_stays_at_its_engine(server: Served) -> None:
    before = server.metric("loong:routed_cached_tokens_total")
    conversation: list[int] = [9, *PROMPT]
    for turn in range(4):
        body = {"prompt": conversation, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
        found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (len(conversation) - 4 if turn else 0)
        conversation += [*found["choices"][0]["token_ids"], 7, 8, 9]
    assert server.metric("loong:routed_cached_tokens_total") > before


def test_metrics_of_all_engines_are_one_page_without_a_series_twice(server: Served) -> None:
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    families = list(text_string_to_metric_families(text))
    assert len(families) == len({family.name for family in families})
    series = [(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples]
    assert len(series) == len(set(series))
    engines = {dict(labels).get("engine") for name, labels in series if name == "loong:instance_busy"}
    assert engines == {"0", "1"}
    assert server.metric("loong:instances") == server.metric("loong:instance_busy") + 4 == 4


def test_what_is_one_engines_own_goes_to_the_engine_that_is_named(server: Served) -> None:
    def got(path: str, method: str = "GET", **fields: Any) -> httpx.Response:
        return httpx.request(method, server.url + path, headers=HEADERS, timeout=60, **fields)

    refused = got("/admin/instances")
    assert refused.status_code == 400
    assert "?engine=0 to ?engine=1" in refused.json()["error"]["message"]
    assert got("/trace?engine=2").status_code == 400
    assert "traceEvents" in got("/trace?engine=1").json()
    assert got("/reset_prefix_cache", "POST").json() == {"status": "reset"}
    assert got("/dashboard").status_code == 200
    with httpx.stream("GET", f"{server.url}/dashboard/events?engine=1", timeout=30) as feed:
        hello = next(line for line in feed.iter_lines() if line.startswith("data: {"))
    assert json.loads(hello.removeprefix("data: "))["num_engines"] == 2
    scaled = got("/admin/scale?engine=1&wait=true", "POST", json={"num_instances": 3})
    assert [i["id"] for i in scaled.json()["instances"]] == [0, 1, 2]
    assert got("/admin/instances?engine=0").json()["num_instances"] == 2
    assert got("/admin/scale?engine=1&wait=true", "POST", json={"num_instances": 2}).status_code == 200
