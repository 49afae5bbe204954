"""The Ray actor of one host, which only starts, watches and ends worker processes."""

import asyncio
from contextlib import ExitStack

import ray

from loong.hardware.gpus import Gpu, host_gpus
from loong.launcher.cluster.run_directory import run_directory
from loong.launcher.cluster.worker_fork_server import worker_fork_server
from loong.processes.child import config_of
from loong.processes.child_processes import ChildProcess, stop
from loong.worker.config import WorkerConfig


class HostActor:
    """The workers of one host, numbered by the engine's process. Its log has all that they log.

    They meet in `directory`, that of the engine's process on the head, and None on other hosts.
    """

    def __init__(self, directory: str | None) -> None:
        self._stack = ExitStack()
        self._directory = directory or str(self._stack.enter_context(run_directory()).path)
        self._fork_server = worker_fork_server()
        self._stack.callback(self._fork_server.close)
        self._processes: dict[int, ChildProcess] = {}

    async def place(self) -> tuple[str, str]:
        """Return the folder for sockets of its workers, and its node's IP address."""
        return self._directory, ray.util.get_node_ip_address()

    async def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that Ray gives to its workers."""
        return host_gpus()

    async def run(self, number: int, config: bytes) -> tuple[int | None, int]:
        """Run a worker by a line of `config_line`. Return its process id and exit code."""
        process = self._fork_server.start(config_of(config, WorkerConfig))
        self._processes[number] = process
        code = await process.wait()
        del self._processes[number]
        return process.pid, code

    async def send_signal(self, number: int, which: int) -> None:
        """Send a worker a signal, unless it has ended."""
        if (process := self._processes.get(number)) is not None:
            process.send_signal(which)

    async def close(self) -> None:
        """Wait until all workers have ended, which were asked to, and remove what they used."""
        await asyncio.gather(*(stop(process) for process in self._processes.values()))
        self._stack.close()
