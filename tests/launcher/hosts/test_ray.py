"""A server over the nodes of a Ray cluster, which are 127.0.0.2 and 127.0.0.3.

Run it with `pytest -m ray tests/launcher/hosts`, where `pip install 'loong[ray]'` was done.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest
from child_processes import children_of
from served import free_port, served, wait_until

pytestmark = pytest.mark.ray

RAY = str(Path(sys.executable).parent / "ray")
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
SECONDS = 120
PROMPT, NUM_TOKENS = "once", 100


class RayNodes:
    """Nodes of a Ray cluster, each a process that ends all of its node when it ends."""

    def __init__(self, folder: Path) -> None:
        self.address = f"{HEAD}:{free_port()}"
        self.environment: Mapping[str, str] = {
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._folder = folder

    @contextmanager
    def node(self, address: str, *arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
        """A node of two processors."""
        sizes = ("--num-cpus", "2", "--object-store-memory", "100000000", "--block")
        command = [RAY, "start", "--node-ip-address", address, *sizes, *arguments]
        with (self._folder / f"{address}-{time.time_ns()}.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **self.environment}, cwd=self._folder
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(SECONDS)

    def head(self) -> "AbstractContextManager[subprocess.Popen[bytes]]":
        """The node of the engine."""
        port = self.address.rpartition(":")[2]
        return self.node(HEAD, "--head", "--port", port, "--include-dashboard", "false")

    def other(self) -> "AbstractContextManager[subprocess.Popen[bytes]]":
        """A node that joins."""
        return self.node(OTHER, "--address", self.address)


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with TemporaryDirectory(prefix="ray-") as folder:  # a short path, for Ray's sockets
        yield RayNodes(Path(folder))


def with_descendants(pid: int) -> list[int]:
    """Return a process and all that it and its children have started, and so on."""
    return [pid, *(found for child in children_of(pid) for found in with_descendants(child))]


def text_of(url: str) -> str:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS)
    found: str = answer.raise_for_status().json()["choices"][0]["text"]
    return found


def test_streams_outlive_the_loss_of_a_node_and_the_next_node_joins(nodes: RayNodes, tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(nodes.head())
        other = stack.enter_context(nodes.other())
        sizes = (
            "--num-hosts",
            "2",
            "--num-instances",
            "4",
            "--kv-cache-tokens",
            "2048",
            "--dtype",
            "float32",
        )
        server = stack.enter_context(
            served(tmp_path, "--hosts", "ray", *sizes, "--policy", "static-sp", environment=nodes.environment)
        )
        expected = text_of(server.url)
        stream = server.client.completions.create(
            model="loong-tiny",
            prompt=PROMPT,
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = next(stream).choices[0].text
        for pid in with_descendants(other.pid):
            os.kill(pid, signal.SIGKILL)
        text += "".join(part.choices[0].text for part in stream)
        assert text == expected
        assert server.metric("loong:instance_losses_total") == 2

        def health() -> str:
            found: str = httpx.get(f"{server.url}/health", timeout=SECONDS).json()["status"]
            return found

        assert health() == "degraded"
        stack.enter_context(nodes.other())
        wait_until(lambda: health() == "ok", SECONDS, f"the node to join:\n{server.log}")
        assert text_of(server.url) == expected
        assert "host 1 is the Ray node at 127.0.0.3" in server.log


def test_a_cluster_of_its_own_needs_a_token(tmp_path: Path) -> None:
    """Without RAY_ADDRESS a cluster starts here, which refuses what has no token."""
    home = {"HOME": str(tmp_path), "RAY_TMPDIR": "/tmp"}
    with served(tmp_path, "--hosts", "ray", "--num-instances", "1", environment=home) as server:
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


def test_too_few_nodes_are_named(nodes: RayNodes, tmp_path: Path) -> None:
    with nodes.head(), (tmp_path / "log").open("wb") as log:
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
