"""Hosts that are loopback addresses of this machine, each with a fork server and a folder of its own."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from warm_commands import warm_fork_servers

from loong.core.placement import InstanceId
from loong.launcher.cluster.config import ClusterConfig
from loong.launcher.cluster.starter import Host, placed
from loong.launcher.cluster.worker_fork_server import worker_fork_server
from loong.processes.child_processes import ChildProcess
from loong.processes.fork_server import ForkServer
from loong.worker.config import ENVIRONMENT, WorkerConfig


class SimulatedHosts:
    """A WorkerStarter for the hosts 127.0.0.2, 127.0.0.3 and so on. Host 0 is the head, at `first` of these.

    On GPUs, each has the GPU of its number.
    """

    trouble = ""

    def __init__(self, config: ClusterConfig, folder: Path, first: int = 0) -> None:
        self._host_ids, self._device = config.host_ids, config.device
        self._folder, self._first = folder, first
        self._servers: dict[int, ForkServer] = {}
        self._num_starts = 0
        self._came = asyncio.Event()
        for host_id in range(config.num_hosts):
            self.add(host_id)

    def add(self, host_id: int) -> None:
        """Start a host, for the first time or again."""
        self._num_starts += 1
        self._directory(host_id).mkdir(exist_ok=True)
        if self._device == "cpu":
            with warm_fork_servers():
                self._servers[host_id] = worker_fork_server()
        else:
            self._servers[host_id] = _with_one_gpu(host_id)
        self._came.set()

    def lose(self, host_id: int) -> None:
        """End a host with all its workers at once."""
        self._servers.pop(host_id).close()

    def close(self) -> None:
        """End all hosts."""
        for server in self._servers.values():
            server.close()

    def host(self, instance_id: InstanceId) -> Host:
        """See WorkerStarter."""
        host_id = self._host_ids[instance_id]
        return Host(self._directory(host_id), f"127.0.0.{2 + self._first + host_id}", is_head=host_id == 0)

    async def wait_for_host(self, instance_id: InstanceId) -> None:
        """See WorkerStarter."""
        while self._host_ids[instance_id] not in self._servers:
            self._came.clear()
            await self._came.wait()

    def start(self, config: WorkerConfig) -> ChildProcess:
        """See WorkerStarter."""
        return self._servers[self._host_ids[config.instance_id]].start(config)

    def start_lent(self, config: WorkerConfig, instance_id: InstanceId, loan_id: str) -> ChildProcess:
        """See WorkerStarter."""
        host, folder = self.host(instance_id), self._folder / loan_id
        folder.mkdir(exist_ok=True)
        assert host.address is not None
        moved = replace(placed(config, host.address), run_directory=str(folder))
        return self._servers[self._host_ids[instance_id]].start(moved)

    def kill(self, processes: Iterable[ChildProcess]) -> None:
        """See WorkerStarter."""
        for process in processes:
            process.kill()

    def _directory(self, host_id: int) -> Path:
        return self._folder / f"host-{host_id}"


def _with_one_gpu(host_id: int) -> ForkServer:
    environment = {"CUDA_VISIBLE_DEVICES": str(host_id), "NCCL_HOSTID": f"host {host_id}"}
    return ForkServer("loong.worker.process", {**ENVIRONMENT, **environment})


@contextmanager
def simulated_hosts(config: ClusterConfig, first: int = 0) -> Iterator[SimulatedHosts]:
    """Hosts for the workers of a cluster."""
    with TemporaryDirectory(prefix="loong-hosts-") as folder:
        hosts = SimulatedHosts(config, Path(folder), first)
        try:
            yield hosts
        finally:
            hosts.close()
