"""The hosts of workers, and what starts workers on them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loong.core.placement import InstanceId
from loong.launcher.cluster.run_directory import RunDirectory
from loong.processes.child_processes import ChildProcess
from loong.processes.fork_server import ForkServer
from loong.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Host:
    """A machine with workers: a folder for the sockets between them, and its IP address for other hosts.

    The head is the host of the engine, and of the first instance.
    """

    directory: Path
    address: str | None = None  # None: there are no other hosts
    is_head: bool = True


class WorkerStarter(Protocol):
    """Starts workers, each on the host of its instance."""

    @property
    def trouble(self) -> str:
        """Return the reason why none can start any more, an empty string if there is none."""

    def host(self, instance_id: InstanceId) -> Host:
        """Return the host on which workers of an instance start now."""

    async def wait_for_host(self, instance_id: InstanceId) -> None:
        """Return once workers of an instance can start. Raises `ClusterError` if they never can."""

    def start(self, config: WorkerConfig) -> ChildProcess:
        """Start a worker."""

    def kill(self, processes: Iterable[ChildProcess]) -> None:
        """Kill workers at once, also those that have yet to begin."""


class LocalStarter:
    """Implements WorkerStarter for this host alone, whose workers meet in `directory`."""

    def __init__(self, fork_server: ForkServer, directory: RunDirectory) -> None:
        self._fork_server, self._directory = fork_server, directory
        self._host = Host(directory.path)

    @property
    def trouble(self) -> str:
        """See WorkerStarter."""
        return self._directory.trouble

    def host(self, instance_id: InstanceId) -> Host:  # noqa: ARG002 - see WorkerStarter
        """See WorkerStarter."""
        return self._host

    async def wait_for_host(self, instance_id: InstanceId) -> None:
        """See WorkerStarter."""

    def start(self, config: WorkerConfig) -> ChildProcess:
        """See WorkerStarter."""
        return self._fork_server.start(config)

    def kill(self, processes: Iterable[ChildProcess]) -> None:
        """See WorkerStarter."""
        self._fork_server.kill(processes)
