"""`loong serve` as its users see it, with real processes, sockets and signals."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion
from pydantic import BaseModel, Field
from raw_http import request_head
from served import Served, assert_gone, served, wait_until

from loong.launcher.cli import main
from loong.server.api.listen import bound_socket


class Rating(BaseModel):
    mood: Literal["happy", "sad"]
    stars: int = Field(ge=1, le=5)


POOL = 256
NUM_INSTANCES = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("serving")
    arguments = ("--num-instances", str(NUM_INSTANCES), "--kv-cache-tokens", str(POOL))
    with served(directory, *arguments) as running:
        yield running


def kv_in_use(server: Served) -> float:
    return server.metric("loong:instance_kv_tokens")


def greedy(server: Served, prompt: list[int], num_tokens: int) -> str:
    answer = server.client.completions.create(
        model="loong-tiny",
        prompt=prompt,
        max_tokens=num_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == num_tokens
    return answer.choices[0].text


def test_a_stream_that_is_stopped_half_way_is_aborted_and_its_kv_freed(server: Served) -> None:
    stream = server.client.completions.create(
        model="loong-tiny", prompt="once", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    received = [next(stream) for _ in range(3)]
    assert all(chunk.choices for chunk in received)
    stream.close()
    wait_until(lambda: "aborted" in server.log, 60, "the abort to be logged")
    wait_until(lambda: kv_in_use(server) == 0, 60, "the KV to be free")


def test_choices_share_a_prompt_of_which_there_is_no_room_for_two(server: Served) -> None:
    def ask(n: int, seed: int) -> list[str]:
        answer = server.client.completions.create(
            model="loong-tiny",
            prompt=[5 + i % 90 for i in range(600)],
            max_tokens=10,
            n=n,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (600, 10 * n)
        return [choice.text for choice in answer.choices]

    assert ask(4, seed=7) == [text for seed in range(7, 11) for text in ask(1, seed)]
    wait_until(lambda: kv_in_use(server) == 0, 60, "the KV to be free")


def test_a_client_that_reads_nothing_holds_no_kv(server: Served) -> None:
    url = httpx.URL(server.url)
    body = b'{"prompt": "once", "max_tokens": 500, "stream": true, "ignore_eos": true}'
    head = request_head("/v1/completions", f"Content-Length: {len(body)}")
    num_generated = server.metric("vllm:generation_tokens_total")
    with socket.create_connection((url.host, url.port or 0)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.sendall(head + body)
        wait_until(lambda: kv_in_use(server) > 0, 60, "the request to run")
        wait_until(lambda: kv_in_use(server) == 0, 60, "its KV to be free")
        assert server.metric("vllm:generation_tokens_total") > num_generated


def test_nothing_but_the_api_listens_on_a_network(server: Served) -> None:
    pids = [server.process.pid, *server.worker_pids()]
    links = [str(link.readlink()) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    rows = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    is_listening = "0A"
    found = [row[1] for row in rows if f"socket:[{row[9]}]" in links and row[3] in (is_listening, "07")]
    assert found == [f"0100007F:{httpx.URL(server.url).port:04X}"]


def test_a_chat_streams_the_text_that_it_gives_at_once(server: Served) -> None:
    def ask(stream: bool) -> str:
        answer = server.client.chat.completions.create(
            model="loong-tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=20,
            temperature=0,
            stream=stream,
        )
        if isinstance(answer, openai.Stream):
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        return answer.choices[0].message.content or ""

    assert ask(stream=True) == ask(stream=False) != ""


def test_structured_answers_are_of_their_schema(server: Served) -> None:
    pytest.importorskip("xgrammar")
    answer = server.client.chat.completions.parse(
        model="loong-tiny",
        messages=[{"role": "user", "content": "hi"}],
        response_format=Rating,
        max_tokens=150,
        n=3,
    )
    ratings = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(rating, Rating) and rating.stars in range(1, 6) for rating in ratings)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_comes_to_a_dead_end_is_the_clients_error(server: Served, stream: bool) -> None:
    nothing: dict[str, object] = {"anyOf": [{"$ref": "#/properties/a"}]}
    schema: dict[str, object] = {"type": "object", "properties": {"a": nothing}, "required": ["a"]}

    def answered() -> None:
        answer = server.client.chat.completions.create(
            model="loong-tiny",
            messages=[{"role": "user", "content": "hi"}],
            response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
            max_tokens=150,
            stream=stream,
        )
        for _ in answer:
            pass

    with pytest.raises(openai.APIError, match="the grammar allows no token") as refusal:
        answered()
    assert refusal.value.type == "invalid_request_error"
    assert refusal.value.param == "response_format"


def test_a_prompt_longer_than_a_pool_is_spread_over_instances(server: Served) -> None:
    prompt = [5 + i % 90 for i in range(2 * POOL)]
    assert greedy(server, prompt, 8)
    assert server.metric("loong:esp_group_size_sum") > server.metric("loong:esp_group_size_count")


def test_a_prompt_longer_than_the_cluster_is_refused_with_both_numbers(server: Served) -> None:
    length = NUM_INSTANCES * POOL + 1
    with pytest.raises(openai.BadRequestError) as refusal:
        greedy(server, [5] * length, 1)
    assert str(length) in refusal.value.message
    assert str(NUM_INSTANCES * POOL) in refusal.value.message


def test_requests_that_cannot_all_fit_give_the_tokens_they_give_alone(server: Served) -> None:
    prompts = [[3 + (7 * i + j) % 200 for j in range(40 + i % 9)] for i in range(15)]
    num_tokens = 24  # with the prompts, a third more than the room

    async def all_at_once() -> list[str]:
        client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=240)

        async def one(prompt: list[int]) -> str:
            answer = await client.completions.create(
                model="loong-tiny",
                prompt=prompt,
                max_tokens=num_tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            return answer.choices[0].text

        async with client:
            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    together = asyncio.run(all_at_once())
    assert together == [greedy(server, prompt, num_tokens) for prompt in prompts]
    assert kv_in_use(server) == 0


def test_streams_go_on_when_workers_are_killed_and_the_instances_join_again(tmp_path: Path) -> None:
    with served(tmp_path, "--num-instances", "2") as server:
        workers = server.worker_pids()
        undisturbed = greedy(server, [5, 6, 7], 150)
        stream = server.client.completions.create(
            model="loong-tiny",
            prompt=[5, 6, 7],
            max_tokens=150,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = next(stream).choices[0].text
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == undisturbed
        wait_until(
            lambda: len(set(server.worker_pids()) - set(workers)) == 2, 30, "both workers to start again"
        )
        wait_until(lambda: joins(server) == 2, 60, "both instances to join")
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert greedy(server, [5, 6, 7], 150) == undisturbed
        started_again = server.worker_pids()
        stream = server.stream_of(100)
        server.process.send_signal(signal.SIGINT)
        assert_drains(server, stream)
        assert_gone([*workers, *started_again])


def joins(server: Served) -> float:
    """Return the number of instances that have joined again."""
    text = httpx.get(f"{server.url}/metrics", timeout=30).text
    return float(re.findall(r"^loong:instance_joins_total\S* (\S+)", text, re.MULTILINE)[0])


def assert_drains(server: Served, stream: openai.Stream[Completion]) -> None:
    """Assert that a server that got a signal finishes a stream and leaves nothing."""
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert server.process.wait(60) == 0
    assert not server.run_directories
    with bound_socket("127.0.0.1", httpx.URL(server.url).port or 0):
        pass  # the port is free


def test_a_server_that_drains_takes_nothing_new_on_connections_that_are_open(tmp_path: Path) -> None:
    with (
        served(tmp_path, "--num-instances", "1") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        assert client.get("/health").status_code == 200
        assert len(server.run_directories) == 1
        stream = server.stream_of(600)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "draining" in server.log, 60, "the drain to begin")
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["Connection"] == "close"
        with pytest.raises(httpx.ConnectError):
            client.get("/health")
        assert_drains(server, stream)


def test_a_second_signal_does_not_wait_for_open_requests(tmp_path: Path) -> None:
    with served(tmp_path, "--num-instances", "1") as server:
        workers = server.worker_pids()
        server.stream_of(10000)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log, 60, "the drain to begin")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 130
        assert_gone(workers)


@pytest.mark.parametrize("seconds", ["0", "1"])
def test_a_drain_ends_in_time_and_says_so_to_those_it_cuts_off(tmp_path: Path, seconds: str) -> None:
    with served(tmp_path, "--num-instances", "1", "--drain-timeout", seconds) as server:
        workers = server.worker_pids()
        stream = server.stream_of(60000)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="stopped"):
            list(stream)
        assert server.process.wait(60) == 1
        assert_gone(workers)


def test_a_server_that_allows_no_faults_is_named_with_its_flag(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", "--base-url", server.url, "--kill", "1/1s"]) == 1
    assert "--allow-fault-injection" in capsys.readouterr().err
