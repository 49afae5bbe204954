"""Loans between the engines of a server: what their processes and the server's process do for them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loong.engine.room_lending import RoomLending
from loong.executor.recovery import Backoff, Failures
from loong.launcher.serve.build import Served
from loong.launcher.serve.lending_manager import LendingManagerConfig
from loong.launcher.serve.lending_socket import LendingSocket
from loong.lending.engine_room import Loan
from loong.lending.messages import Address, Frame, Member, Members
from loong.lending.peers import Peers
from loong.processes.child_processes import ChildProcess, how_it_ended
from loong.processes.fork_server import ForkServer
from loong.scheduler.common.expected_lengths import as_admitted

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.1
_PROCESS = "loong.launcher.serve.lending_manager"
_MANAGER = -1  # the gManager among the ids whose failures are counted


@dataclass(frozen=True, slots=True)
class LendingConfig:
    """The directory of the sockets, and the number of processes that an engine has had."""

    folder: str
    epoch: int


class EngineLending:
    """An engine's part in loans, with the socket for its messages."""

    def __init__(self, served: Served, config: LendingConfig) -> None:
        executor, cluster = served.executor, served.prepared.config.cluster
        assert executor.restarts is not None, "a server starts workers again"
        workers = executor.restarts.room
        assert workers is not None, "those of loans, too"
        engine, policy = served.engine, served.prepared.config.policy
        peers = Peers((served.prepared.config.server.engine_id,), config.epoch, {})
        self._sockets = LendingSocket(Path(config.folder), peers.own[0], self._take)
        self._lending = RoomLending(
            peers,
            executor,
            workers,
            cluster.loan_ids,
            lambda: as_admitted(engine.snapshot(), policy),
            self._sockets.send,
        )
        served.observe(self._lending)

    def loans(self) -> Sequence[Loan]:
        """Return the loans that there are now."""
        return self._lending.loans

    async def run(self) -> None:
        """Lend and borrow until cancelled."""
        try:
            while True:
                await asyncio.sleep(TURN_SECONDS)
                self._sockets.retry()
                self._lending.tick()
        finally:
            self._sockets.close()

    def _take(self, message: Frame) -> None:
        self._lending.take(message)


class LendingSupervisor:
    """Keeps a gManager, and sends it and all engines the list of those that are there.

    This list may be late. Without a gManager only new loans are missing.
    """

    def __init__(self, folder: Path, log_format: str) -> None:
        self._folder, self._log_format = folder, log_format
        self._fork_server = ForkServer(_PROCESS, {})
        self._sockets = LendingSocket(folder, "supervisor", lambda _: None)
        self._members: dict[Address, Member] = {}
        self._epoch = 0
        self._failures = Failures(Backoff(max_failures=1 << 30))
        self._process: ChildProcess | None = None

    def join(self, engine_id: int, epoch: int, capacity: int) -> None:
        """Add an engine that serves, with the tokens that its instances hold."""
        self._members[engine_id] = Member(engine_id, epoch, capacity)
        self._notify()

    def lose(self, engine_id: int) -> None:
        """Remove an engine that is lost."""
        self._members.pop(engine_id, None)
        self._notify()

    def kill_manager(self) -> bool:
        """Kill the gManager at once, as a fault. Return whether there is one."""
        if self._process is None or self._process.returncode is not None:
            return False
        self._process.kill()
        return True

    async def watch(self) -> None:
        """Start a gManager whenever there is none, and repeat who is there, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_manager())
            while True:
                self._sockets.retry()
                self._notify()
                await asyncio.sleep(1.0)

    def stop(self) -> None:
        """End the gManager."""
        self.kill_manager()
        self._fork_server.close()
        self._sockets.close()

    async def _keep_manager(self) -> None:
        while True:
            self._epoch += 1
            config = LendingManagerConfig(str(self._folder), self._epoch, self._log_format)
            self._process = self._fork_server.start(config)
            self._members[None] = Member(None, self._epoch)
            self._failures.join(_MANAGER)
            self._notify()
            code = await self._process.wait()
            del self._members[None]
            self._notify()
            logger.error(
                "the gManager %s; until there is another, there are no new loans", how_it_ended(code)
            )
            await asyncio.sleep(self._failures.fail(_MANAGER) or 0.0)

    def _notify(self) -> None:
        members = Members(tuple(self._members.values()))
        for address in self._members:
            self._sockets.send_members(address, members)
