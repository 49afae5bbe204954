"""A server goes on without its fork servers and its run directory, and says what is missing."""

import os
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from child_processes import fork_servers_of, name_of
from served import Served, served, wait_until


def health(server: Served) -> dict[str, object]:
    answer = httpx.get(f"{server.url}/health", timeout=30)
    assert answer.status_code == 200
    found: dict[str, object] = answer.json()
    return found


def completed(server: Served, **fields: object) -> str:
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_fork_servers_that_are_killed_are_replaced_while_streams_go_on_and_what_dies_later_returns(
    tmp_path: Path,
) -> None:
    with served(tmp_path, "--num-instances", "2", "--api-server-count", "2") as server:
        expected, before = completed(server), server.worker_pids()
        stream = server.stream_of(300)
        killed = fork_servers_of(server.process.pid)
        assert len(killed) == 2
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.log.count("another takes its place") == 2, 60, "both to be replaced")
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert server.worker_pids() == before
        for kind in ("loong-worker", "loong-api"):
            os.kill(next(pid for pid in before if name_of(pid).startswith(kind)), signal.SIGKILL)
        wait_until(lambda: len(set(server.worker_pids()) - set(before)) == 2, 60, "what was killed to return")
        wait_until(lambda: health(server) == {"status": "ok"}, 60, "all instances to serve")
        assert completed(server) == expected
        assert server.stop() == 0


def test_a_server_whose_run_directory_is_removed_serves_on_and_says_that_nothing_can_start_again(
    tmp_path: Path,
) -> None:
    with (
        TemporaryDirectory() as folder,  # `tmp_path` is too long for sockets
        served(tmp_path, "--num-instances", "2", environment={"TMPDIR": folder}) as server,
    ):
        expected = completed(server)
        completed(server, structured_outputs={"regex": "[cd]+"})  # all workers are connected then
        (directory,) = Path(folder).glob("loong-run-*")
        shutil.rmtree(directory)
        found = health(server)
        assert found["status"] == "degraded"
        assert f"the run directory {directory} is gone" in str(found["message"])
        assert completed(server, structured_outputs={"regex": "[ab]+"}).strip("ab") == ""
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        wait_until(lambda: "quarantined" in str(health(server).get("instances")), 60, "the loss")
        assert completed(server) == expected
        assert server.stop() == 0


def test_api_processes_whose_run_directory_is_removed_serve_on_and_say_so(tmp_path: Path) -> None:
    with (
        TemporaryDirectory() as folder,  # `tmp_path` is too long for sockets
        served(
            tmp_path, "--num-instances", "1", "--api-server-count", "2", environment={"TMPDIR": folder}
        ) as server,
    ):
        expected = completed(server)
        for directory in Path(folder).glob("loong-run-*"):
            shutil.rmtree(directory)
        found = health(server)
        assert found["status"] == "degraded"
        assert "is gone" in str(found["message"])
        assert completed(server) == expected
        assert server.stop() == 0
