"""`loong serve` as its users run it: a real process with real workers, sockets and signals."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import failing_worker
import httpx
from child_processes import fork_servers_of, forked_of
from openai import OpenAI, Stream
from openai.types import Completion
from warm_commands import ForkedProcess, start_command

from loong.runs.spawned_server import ENTRY

START_SECONDS = 90.0
LATE_VARIABLES = {"TMPDIR", failing_worker.ARMED}  # which no import reads
QUICK_START = ("--calibration-time", "0")
HASTY_HEARTBEAT = 0.1  # seconds
HASTY_ENTRY = f"""
from dataclasses import replace
from loong.launcher.serve import serving

serve = serving.serve_until_stopped

def serve_hastily(config, *others):
    cluster = replace(config.cluster, heartbeat={HASTY_HEARTBEAT})
    return serve(replace(config, cluster=cluster), *others)

serving.serve_until_stopped = serve_hastily
{ENTRY}
"""
FAILING_ENTRY = f"""
from loong.launcher.cluster import worker_fork_server

worker_fork_server._WORKER = "{failing_worker.MODULE}"
{ENTRY}
"""
IMPATIENT_FAILURES = 2
IMPATIENT_ENTRY = f"""
from functools import partial
from loong.launcher.serve import build

build.Backoff = partial(build.Backoff, steady=3600.0, max_failures={IMPATIENT_FAILURES})
{ENTRY}
"""


@dataclass(frozen=True)
class Served:
    """A server that is up."""

    process: subprocess.Popen[bytes] | ForkedProcess
    url: str
    log_path: Path

    @property
    def address(self) -> tuple[str, int]:
        """Return its host and port."""
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    @property
    def log(self) -> str:
        """All it has said."""
        return self.log_path.read_text()

    @property
    def client(self) -> OpenAI:
        """The official client."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def health(self) -> dict[str, Any]:
        """Return what `/health` says."""
        found: dict[str, Any] = httpx.get(f"{self.url}/health", timeout=30).json()
        return found

    def stream_of(self, num_tokens: int) -> Stream[Completion]:
        """Begin a stream of a number of tokens, and return it once one has come."""
        stream = self.client.completions.create(
            model="loong-tiny",
            prompt="x",
            max_tokens=num_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        return stream

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no {name} in:\n{text}"
        return sum(map(float, values))

    @property
    def run_directories(self) -> list[Path]:
        """Return the folders of its sockets, which it holds open; none once it has ended."""
        folder = Path(f"/proc/{self.process.pid}/fd")
        links = [link.readlink() for link in folder.iterdir() if link.is_symlink()] if folder.exists() else []
        return [link for link in links if link.name.startswith("loong-run-") and link.is_dir()]

    def worker_pids(self) -> list[int]:
        """Return the processes that were forked for it."""
        return forked_of(self.process.pid)

    @property
    def processes(self) -> list[int]:
        """Return its process and all that it has started."""
        return [self.process.pid, *fork_servers_of(self.process.pid), *self.worker_pids()]

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def served(
    directory: Path,
    *arguments: str,
    redirections: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    stderr: int = subprocess.STDOUT,
    entry: str = ENTRY,
    start_seconds: float = START_SECONDS,
) -> Iterator[Served]:
    """Serve until the context ends; fails the test if that leaves a worker behind.

    `redirections` are a shell's. `stderr` is a descriptor, which is closed here once the server has it.
    A new Python runs servers with these, or with an `environment` that imports may read.
    With `FAILING_ENTRY` workers fail on demand, as in `failing_worker`.
    With `HASTY_ENTRY` there are heartbeats every `HASTY_HEARTBEAT`, so a silent worker is soon given up. With
    `IMPATIENT_ENTRY`, an instance that failed `IMPATIENT_FAILURES` times is quarantined.
    """
    port = free_port()
    log_path = directory / "server.log"
    with log_path.open("wb") as log:
        words = ["serve", "--port", str(port), *QUICK_START, *arguments]
        variables = {**os.environ, **environment}
        process: subprocess.Popen[bytes] | ForkedProcess
        if not redirections and environment.keys() <= LATE_VARIABLES:
            outputs = log.fileno(), log.fileno() if stderr == subprocess.STDOUT else stderr
            process = start_command(entry, words, variables, directory, outputs)
        else:
            process = _new_python(["-c", entry, *words], directory, log, stderr, redirections, variables)
    if stderr != subprocess.STDOUT:
        os.close(stderr)
    server = Served(process, f"http://127.0.0.1:{port}", log_path)
    try:
        wait_until(lambda: _is_up(server), start_seconds, f"the server to start:\n{server.log}")
        workers = [*fork_servers_of(process.pid), *server.worker_pids()]
        yield server
        if process.poll() is None:
            assert server.stop() == 0, server.log
        assert_gone(workers)
    finally:
        process.kill()
        process.wait()


def _new_python(
    words: Sequence[str],
    directory: Path,
    stdout: IO[bytes],
    stderr: int,
    redirections: str,
    environment: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    with _hangups_heeded():
        return subprocess.Popen(
            ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, *words],
            stdout=stdout,
            stderr=stderr,
            cwd=directory,
            env=environment,
        )


@contextmanager
def _hangups_heeded() -> Iterator[None]:
    """Let processes that start inside the context handle SIGHUP, though the tests may run under `nohup`."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


def assert_gone(pids: Sequence[int], timeout: float = 60) -> None:
    """Fail unless none of these processes is left after a moment."""
    wait_until(lambda: not [p for p in pids if Path(f"/proc/{p}").exists()], timeout, f"{pids} to end")


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Poll until a condition holds; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.02)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_up(server: Served) -> bool:
    assert server.process.poll() is None, f"the server ended:\n{server.log}"
    try:
        return httpx.get(f"{server.url}/health").status_code == 200
    except httpx.TransportError:
        return False
