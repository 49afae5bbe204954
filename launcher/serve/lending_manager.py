"""The gManager's process: it knows by heartbeats which engine has room, and names creditors to debtors."""

import asyncio
import sys
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from time import monotonic

from loong.launcher.serve.lending_socket import LendingSocket
from loong.lending.engine_room import blocks_of
from loong.lending.global_manager import GlobalManager, Planning
from loong.lending.messages import Frame, Members
from loong.lending.peers import Peers
from loong.processes.child import config_of, end_with_parent, leave_signals_to_parent, name_process
from loong.processes.logs import log_to_stderr

TURN_SECONDS = 1.0  # between two rounds of swaps
LEAST_SWAP = 4  # blocks


@dataclass(frozen=True, slots=True)
class LendingManagerConfig:
    """The directory of the sockets, and the number of managers that there have been."""

    folder: str
    epoch: int
    log_format: str = "text"


def main() -> None:
    """Serve until standard input is closed, which the death of the server's process does."""
    leave_signals_to_parent()
    stdin = FileIO(sys.stdin.fileno(), closefd=False)
    config = config_of(stdin.readline(), LendingManagerConfig)
    name_process("loong-lending")
    log_to_stderr(config.log_format, "")
    end_with_parent(stdin)
    asyncio.run(_serve(config))


async def _serve(config: LendingManagerConfig) -> None:
    manager = GlobalManager(Peers((None,), config.epoch, {}), {}, Planning(least_swap=LEAST_SWAP))

    def take(message: Frame) -> None:
        if isinstance(message, Members):
            lost, new = manager.peers.update(message.members)
            for address in lost:
                manager.lost(address)
            for member in new:
                manager.joined(member.address, member.epoch, blocks_of(member.capacity))
        else:
            sockets.send(manager.handle(message, monotonic()))

    sockets = LendingSocket(Path(config.folder), None, take)
    while True:
        await asyncio.sleep(TURN_SECONDS)
        sockets.retry()
        sockets.send(manager.plan())
