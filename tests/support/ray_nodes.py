"""Nodes of a Ray cluster on this machine, which have loopback addresses and are lost and added again."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from child_processes import with_descendants
from served import Served, free_port, served, wait_until

RAY = str(Path(sys.executable).parent / "ray")
HEAD = "127.0.0.2"
STARTED = "Ray runtime started."
MAX_SECONDS = 300  # for a node or a server on it to start, and to end


class RayNodes:
    """Nodes of two processors, each a process that ends all of its node when it ends.

    Processes with `environment` use their cluster.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._address = f"{HEAD}:{free_port()}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment: Mapping[str, str] = {
            "RAY_ADDRESS": self._address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # else other work on this machine comes first
        }

    def add(self, *addresses: str) -> None:
        """Start nodes, one after the other. That of the engine, `HEAD`, is the first of all."""
        for address in addresses:
            log = self._stack.enter_context(self._node(address))
            has_started = partial(_has_started, self._processes[address], log)
            wait_until(has_started, MAX_SECONDS, f"the node at {address} to start")

    def served(self, directory: Path, *arguments: str) -> AbstractContextManager[Served]:
        """Serve on these nodes until the context ends."""
        flags = ("--hosts", "ray", *arguments)
        return served(directory, *flags, environment=self.environment, start_seconds=MAX_SECONDS)

    def lose(self, address: str) -> None:
        """Kill all processes of a node at once."""
        for pid in with_descendants(self._processes.pop(address).pid):
            os.kill(pid, signal.SIGKILL)

    def workers_of(self, address: str) -> list[str]:
        """Return the names of the workers of a node, which have the numbers of their instances."""
        names = []
        for pid in with_descendants(self._processes[address].pid):
            with suppress(FileNotFoundError):  # it has ended
                names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        return [name for name in names if name.startswith("loong-worker-")]

    @contextmanager
    def _node(self, address: str) -> Iterator[Path]:
        """Run a node, and yield its log."""
        sizes = ("--num-cpus", "2", "--object-store-memory", "100000000", "--block")
        port = self._address.rpartition(":")[2]
        head = ("--head", "--port", port, "--include-dashboard", "false")
        place = head if address == HEAD else ("--address", self._address)
        path = self._folder / f"{address}-{time.time_ns()}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [RAY, "start", "--node-ip-address", address, *sizes, *place],
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                cwd=self._folder,
            )
        self._processes[address] = process
        try:
            yield path
        finally:
            process.terminate()
            process.wait(MAX_SECONDS)


def _has_started(process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    return STARTED in log.read_text()


@contextmanager
def ray_nodes() -> Iterator[RayNodes]:
    """Yield a cluster without nodes; at the end none is left."""
    with TemporaryDirectory(prefix="ray-") as folder, ExitStack() as stack:  # a short path, for Ray's sockets
        yield RayNodes(Path(folder), stack)
