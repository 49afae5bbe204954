"""A server of our own for the time of one measurement: started, awaited, and always stopped."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import FrameType

from loong.core.errors import ConfigError
from loong.http_client import HTTPClient, UnreachableError
from loong.private_files import private
from loong.runs.shown_command import shown_command
from loong.workloads.errors import ServerUnusableError

START_ATTEMPTS = 3
POLL_SECONDS = 0.1
HEALTH_SECONDS = 5.0
STOP_SECONDS = 20.0
NUM_LOG_LINES = 15
PORT_IN_USE = ("address already in use", "port in use")
ENTRY = "from loong.launcher.entry import main; raise SystemExit(main())"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The arguments of `loong serve`. `start_timeout` is in seconds, until `/health` answers 200."""

    model: str | None
    num_instances: int
    tensor_parallel_size: int
    extra_arguments: tuple[str, ...]
    start_timeout: float

    def __post_init__(self) -> None:
        if self.num_instances < 1:
            raise ConfigError(f"--num-instances {self.num_instances} is not at least 1")
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size {self.tensor_parallel_size} is not at least 1")
        if not self.start_timeout > 0:
            raise ConfigError(f"--start-timeout {self.start_timeout:g} is not above 0 s")

    def arguments(self, policy: str) -> list[str]:
        """Return the command as a user would type it after `loong`, without an address."""
        return [
            "serve",
            *([] if self.model is None else [self.model]),
            *("--policy", policy),
            *("--num-instances", str(self.num_instances)),
            *("--tensor-parallel-size", str(self.tensor_parallel_size)),
            *self.extra_arguments,
        ]


@contextlib.contextmanager
def spawn_server(config: ServerConfig, policy: str, log_path: Path) -> Iterator[str]:
    """Start a server on a free port of this machine, yield its base URL, and leave nothing of it behind.

    Raises:
        ServerUnusableError: it died or was not healthy in time; the message has the last lines of its log.
    """
    for attempt in range(START_ATTEMPTS):
        port = free_port()
        arguments = [*config.arguments(policy), "--host", "127.0.0.1", "--port", str(port)]
        with process_group([sys.executable, "-c", ENTRY, *arguments], log_path) as process:
            base_url = f"http://127.0.0.1:{port}"
            if is_healthy_in_time(process, base_url, config.start_timeout):
                yield base_url
                return
            status = process.poll()
        is_port_taken = any(sign in log_path.read_text(errors="replace").lower() for sign in PORT_IN_USE)
        if status is None or not is_port_taken or attempt == START_ATTEMPTS - 1:
            command = shown_command(["loong", *arguments])
            raise start_failure(command, status, config.start_timeout, log_path)


def start_failure(
    command: str, status: int | None, start_timeout: float, log_path: Path
) -> ServerUnusableError:
    """Return the error of a server that ended with `status`, or (None) was not healthy in time.

    It has the last lines of the server's log.
    """
    what = f"was not healthy within {start_timeout:g} s" if status is None else f"ended with status {status}"
    return ServerUnusableError(f"`{command}` {what}; its last lines:\n{_last_lines(log_path)}")


@contextlib.contextmanager
def process_group(command: Sequence[str], log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own; on the way out end the whole group.

    A terminal's interrupt reaches only us, and a SIGTERM to us unwinds the stack, so both end here.
    """
    with sigterm_unwinds(), open(log_path, "wb", opener=private) as log:
        process = subprocess.Popen(  # noqa: S603  a command of our own making
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Let a SIGTERM end this process by way of every `finally`, with the code it would have had."""

    def leave(signal_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal_number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def is_healthy_in_time(process: subprocess.Popen[bytes], base_url: str, timeout: float) -> bool:
    """Poll until the server is healthy; False if the process ends or `timeout` seconds are over first."""
    deadline = time.monotonic() + timeout
    client = HTTPClient(base_url, timeout=HEALTH_SECONDS)
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(UnreachableError):
            if _is_healthy(client):
                return True
        time.sleep(POLL_SECONDS)
    return False


def _is_healthy(client: HTTPClient) -> bool:
    """Return whether `/health` answers 200, or a server without that page lists its models."""
    health = client.ask("GET", "/health")
    return health.is_ok or (health.status == HTTPStatus.NOT_FOUND and client.ask("GET", "/v1/models").is_ok)


def free_port() -> int:
    """Return a port that is free now; another process may take it before the server does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _last_lines(log_path: Path) -> str:
    """Return the last lines of a server's log."""
    with log_path.open(errors="replace") as log:
        return "".join(deque(log, maxlen=NUM_LOG_LINES)).rstrip() or "(it printed nothing)"
