"""The Ray actor of one host, which only starts, watches and ends worker processes."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray

from loong.hardware.gpus import Gpu, host_gpus
from loong.launcher.cluster.run_directory import RunDirectory, run_directory
from loong.launcher.cluster.worker_fork_server import worker_fork_server
from loong.processes.child import config_of
from loong.processes.child_processes import ChildProcess, stop
from loong.worker.config import WorkerConfig


class HostActor:
    """The workers of one host, numbered by the engine's process. Its log has all that they log.

    They meet in `directory`, that of the engine's process on the head, and None on other hosts. Workers of
    other engines, which use room that is lent here, meet in a folder for each loan.
    """

    def __init__(self, directory: str | None) -> None:
        self._stack = ExitStack()
        self._directory = directory or str(self._stack.enter_context(run_directory()).path)
        self._fork_server = worker_fork_server()
        self._stack.callback(self._fork_server.close)
        self._processes: dict[int, ChildProcess] = {}
        self._loans: dict[str, _LoanFolder] = {}

    async def place(self) -> tuple[str, str]:
        """Return the folder for sockets of its workers, and its node's IP address."""
        return self._directory, ray.util.get_node_ip_address()

    async def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that Ray gives to its workers."""
        return host_gpus()

    async def run(self, number: int, config: bytes, loan_id: str | None) -> tuple[int | None, int]:
        """Run a worker by a line of `config_line`, maybe of a loan. Return its process id and exit code."""
        found = config_of(config, WorkerConfig)
        if loan_id is None:
            return await self._run(number, found)
        with self._folder_of(loan_id) as folder:
            return await self._run(number, replace(found, run_directory=str(folder)))

    async def _run(self, number: int, config: WorkerConfig) -> tuple[int | None, int]:
        process = self._fork_server.start(config)
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

    @contextmanager
    def _folder_of(self, loan_id: str) -> Iterator[Path]:
        """Yield the folder of a loan, which is there as long as any of its ranks runs."""
        folder = self._loans.get(loan_id) or self._loans.setdefault(loan_id, _LoanFolder())
        folder.num_ranks += 1
        try:
            yield folder.directory.path
        finally:
            folder.num_ranks -= 1
            if not folder.num_ranks:
                del self._loans[loan_id]
                folder.directory.remove()


@dataclass(slots=True)
class _LoanFolder:
    """The folder where the ranks of a loan meet, and the number of those that run."""

    directory: RunDirectory = field(default_factory=RunDirectory)
    num_ranks: int = 0
