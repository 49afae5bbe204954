"""The hosts of workers, and what starts workers on them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from loong.core.errors import ConfigError
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


ELSEWHERE = Host(Path(), "elsewhere", is_head=False)
"""The host of workers that another engine starts, where there are several hosts. That engine chooses it."""


def placed(config: WorkerConfig, address: str) -> WorkerConfig:
    """Return the configuration of a worker of another engine for the host with this address.

    Raises `ConfigError` if it has no network to reach the others of its engine.
    """
    if config.network is None:
        raise ConfigError("a worker of another engine needs a network to start on one of several hosts")
    network = replace(config.network, address=address)
    return replace(config, commands_endpoint=f"tcp://{address}:*", network=network)


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

    def start_lent(self, config: WorkerConfig, instance_id: InstanceId, loan_id: str) -> ChildProcess:
        """Start a worker of another engine where those of an instance are, whose memory it maps.

        The ranks of a loan meet. Raises `ConfigError` if the worker cannot reach its engine from there.
        """

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

    def start_lent(
        self,
        config: WorkerConfig,
        instance_id: InstanceId,  # noqa: ARG002 - see WorkerStarter
        loan_id: str,  # noqa: ARG002 - see WorkerStarter
    ) -> ChildProcess:
        """See WorkerStarter."""
        return self.start(config)

    def kill(self, processes: Iterable[ChildProcess]) -> None:
        """See WorkerStarter."""
        self._fork_server.kill(processes)
