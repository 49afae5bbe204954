"""A server over the nodes of a Ray cluster, which are 127.0.0.2 and others up to 127.0.0.5.

Run it with `pytest -m ray tests/launcher/cluster`, where `pip install '.[ray]'` was done.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from ray_nodes import HEAD, RAY, RayNodes, ray_nodes
from requests_for_tests import expected
from served import Served, served, wait_until

from loong.model.tiny import tiny_model
from loong.observability.decision_log.lines import PlannedLine
from loong.observability.decision_log.reader import read_log

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]  # a node takes long to start on few processors

OTHERS = ("127.0.0.3", "127.0.0.4", "127.0.0.5")
SIZES = ("--kv-cache-tokens", "2048", "--dtype", "float32")
SECONDS = 300
PROMPT, NUM_TOKENS = "once", 100
DOCUMENT = tuple(5 + 11 * i % 90 for i in range(800))
# As in the test of loans on one host: any order of sums gives the same tokens.
OF_ONE_DOCUMENT = [(*DOCUMENT, *(5 + (7 * i + number) % 90 for i in range(40))) for number in (0, 1, 2, 3, 6)]
PROMPTS = [tuple(5 + (7 * i + number) % 90 for i in range(40)) for number in range(4)]


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as found:
        yield found


def text_of(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
    found: str = answer.raise_for_status().json()["choices"][0]["text"]
    return found


def tokens_of(url: str, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=SECONDS)
    found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return found


def health(server: Served) -> str:
    found: str = httpx.get(f"{server.url}/health", timeout=SECONDS).json()["status"]
    return found


def lose_during_a_stream(server: Served, nodes: RayNodes, address: str) -> str:
    """Kill a node once a stream has begun. Return the whole text of the stream."""
    stream = server.client.completions.create(
        model="loong-tiny",
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = next(stream).choices[0].text
    nodes.lose(address)
    return text + "".join(part.choices[0].text for part in stream)


def test_streams_outlive_the_loss_of_a_node_and_the_next_node_joins(nodes: RayNodes, tmp_path: Path) -> None:
    nodes.add(HEAD, OTHERS[0])
    flags = ("--num-hosts", "2", "--num-instances", "4", *SIZES, "--policy", "static-sp")
    with nodes.served(tmp_path, *flags) as server:
        expected = text_of(server.url)
        assert lose_during_a_stream(server, nodes, OTHERS[0]) == expected
        assert server.metric("loong:instance_losses_total") == 2
        assert health(server) == "degraded"
        nodes.add(OTHERS[0])
        wait_until(lambda: health(server) == "ok", SECONDS, f"the node to join:\n{server.log}")
        assert text_of(server.url) == expected
        assert "host 1 is the Ray node at 127.0.0.3" in server.log


def test_four_nodes_are_exact_at_every_dop_while_they_are_lost_and_come_back(
    nodes: RayNodes, tmp_path: Path
) -> None:
    """All instances that are there compute each request. The expected text is that of one local instance."""
    (tmp_path / "local").mkdir()
    with served(tmp_path / "local", "--num-instances", "1", *SIZES) as alone:
        expected = text_of(alone.url)
    nodes.add(HEAD, *OTHERS)
    flags = ("--num-hosts", "4", "--num-instances", "4", *SIZES, "--policy", "static-sp")
    with nodes.served(tmp_path, *flags, "--decision-log", str(tmp_path / "decisions.jsonl")) as server:
        assert text_of(server.url) == expected
        for num_lost, address in enumerate(OTHERS, 1):
            assert lose_during_a_stream(server, nodes, address) == expected
            assert server.metric("loong:instance_losses_total") == num_lost
            assert text_of(server.url) == expected
        assert server.log.count("was lost: its process was on a host that is lost") == len(OTHERS)
        nodes.add(*OTHERS)
        wait_until(lambda: health(server) == "ok", SECONDS, f"all nodes to join:\n{server.log}")
        assert server.metric("loong:instance_joins_total") == len(OTHERS)
        assert text_of(server.url) == expected
    lines = read_log(tmp_path / "decisions.jsonl")
    dops = [batch.dop for line in lines if isinstance(line, PlannedLine) for batch in line.batches]
    assert set(dops) == {1, 2, 3, 4}
    assert dops[0] == dops[-1] == 4


def test_two_engines_on_two_nodes_are_exact_and_go_on_when_one_is_killed(
    nodes: RayNodes, tmp_path: Path
) -> None:
    """Each engine has an instance on each node."""
    folder = tiny_model(tmp_path / "model")
    nodes.add(HEAD, OTHERS[0])
    flags = ("--num-hosts", "2", "--num-instances", "4", "--num-engines", "2", *SIZES)
    faults = ("--allow-fault-injection", "--admin-key", "operators-key")
    with nodes.served(tmp_path, str(folder), *flags, *faults) as server, ThreadPoolExecutor(4) as pool:
        for victim in (None, 0):
            sent = [pool.submit(tokens_of, server.url, prompt) for prompt in PROMPTS]
            if victim is not None:
                wait_until(lambda: server.metric("vllm:num_requests_running") > 0, SECONDS, "the requests")
                fault = {"fault": "kill_engine", "engine": victim}
                headers = {"Authorization": "Bearer operators-key"}
                httpx.post(f"{server.url}/admin/faults", json=fault, headers=headers).raise_for_status()
            for prompt, answer in zip(PROMPTS, sent, strict=True):
                assert answer.result() == expected(folder, prompt, NUM_TOKENS)[0]
            wait_until(lambda: health(server) == "ok", SECONDS, f"both engines to serve:\n{server.log}")
        assert server.log.count("engine-0: host 1 is the Ray node at 127.0.0.3") == 2
        assert server.log.count("engine-1: host 1 is the Ray node at 127.0.0.3") == 1


def loans(server: Served) -> list[dict[str, Any]]:
    engines = httpx.get(f"{server.url}/health", timeout=SECONDS).json()["engines"].values()
    return [loan for engine in engines for loan in engine.get("loans", ())]


def test_engines_on_two_nodes_lend_each_other_room_and_are_exact_whatever_dies(
    nodes: RayNodes, tmp_path: Path
) -> None:
    """All requests go to the engine that has their document cached, and do not fit there.

    A killed gManager is replaced, and a lost node takes the loans there with it.
    """
    folder = tiny_model(tmp_path / "model")
    nodes.add(HEAD, OTHERS[0])
    flags = ("--num-hosts", "2", "--num-instances", "4", "--num-engines", "2", "--lend")
    sizes = ("--kv-cache-tokens", "640", "--dtype", "float32")
    faults = ("--allow-fault-injection", "--admin-key", "operators-key")
    with (
        nodes.served(tmp_path, str(folder), *flags, *sizes, *faults) as server,
        ThreadPoolExecutor(len(OF_ONE_DOCUMENT)) as pool,
    ):
        for victim in (None, "kill_manager", "node"):
            tokens_of(server.url, DOCUMENT, 1)
            num_served = server.metric("loong:kv_served_tokens_total")
            sent = [pool.submit(tokens_of, server.url, prompt) for prompt in OF_ONE_DOCUMENT]
            wait_until(lambda: bool(loans(server)), SECONDS, f"a loan:\n{server.log}")
            if victim is None:
                wait_until(lambda: are_where_they_map(nodes, server.log), SECONDS, "workers of the loan")
            elif victim == "node":
                nodes.lose(OTHERS[0])
            else:
                headers = {"Authorization": "Bearer operators-key"}
                url = f"{server.url}/admin/faults"
                httpx.post(url, json={"fault": victim}, headers=headers).raise_for_status()
            for prompt, answer in zip(OF_ONE_DOCUMENT, sent, strict=True):
                assert answer.result() == expected(folder, prompt, NUM_TOKENS)[0]
            if victim != "node":
                assert server.metric("loong:kv_served_tokens_total") > num_served
            wait_until(lambda: not loans(server), SECONDS, f"the room to return:\n{server.log}")
        assert server.log.count("the gManager was killed by signal 9") == 1
        nodes.add(OTHERS[0])
        wait_until(lambda: health(server) == "ok", SECONDS, f"the node to join:\n{server.log}")


def are_where_they_map(nodes: RayNodes, log: str) -> bool:
    """Return whether the workers of loans are on the nodes of the instances that lend.

    Instance 0 of each engine is on the head, and instance 1 on the other node; others are loans.
    """
    lender_ids = [int(number) for number in re.findall(r"instance (\d) lends", log)]
    workers = [nodes.workers_of(address) for address in (HEAD, OTHERS[0])]
    num_loans = [sum(name[-1] not in "01" for name in names) for names in workers]
    return num_loans == [lender_ids.count(0), lender_ids.count(1)] != [0, 0]


@pytest.mark.parametrize("num_engines", ["1", "2"])
def test_a_cluster_of_its_own_needs_a_token(tmp_path: Path, num_engines: str) -> None:
    """Without RAY_ADDRESS a cluster starts here, which refuses what has no token. All engines are in it."""
    home = {"HOME": str(tmp_path), "RAY_TMPDIR": "/tmp"}
    flags = ("--hosts", "ray", "--num-instances", num_engines, "--num-engines", num_engines)
    with served(tmp_path, *flags, environment=home, start_seconds=SECONDS) as server:
        assert text_of(server.url)
        (line,) = (line for line in server.log.splitlines() if "ray start --address=" in line)
        address = line.partition("--address=")[2].partition("`")[0]
        nobody = {**os.environ, "RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path / "nobody")}
        asked = subprocess.run(
            [RAY, "status", "--address", address],
            env=nobody,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert asked.returncode != 0
        assert "Unauthenticated" in asked.stderr


def test_ray_takes_the_example_of_a_cluster() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    example = Path(__file__).parents[3] / "docs" / "examples" / "ray-cluster.yaml"
    config = prepare_config(msgspec.yaml.decode(example.read_text()))
    validate_config(config)
    (nodes,) = config["available_node_types"].values()
    assert nodes["max_workers"] == 1


def test_too_few_nodes_are_named(nodes: RayNodes, tmp_path: Path) -> None:
    nodes.add(HEAD)
    with (tmp_path / "log").open("wb") as log:
        command = [str(Path(sys.executable).parent / "loong"), "serve", "--hosts", "ray", "--num-hosts", "2"]
        ended = subprocess.run(
            [*command, "--port", "0", "--start-timeout", "15"],
            env={**os.environ, **nodes.environment},
            stdout=log,
            stderr=log,
            timeout=SECONDS,
            check=False,
        )
    assert ended.returncode == 1
    said = (tmp_path / "log").read_text()
    assert (
        "Ray found no 2 nodes with [2, 2] free processors within 15 s; its nodes have 2 at 127.0.0.2" in said
    )
