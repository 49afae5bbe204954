"""The socket for messages about loans: datagrams between processes of a server, in a private directory.

A datagram is whole or lost. Only processes of this user reach the directory.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from loong.lending.messages import (
    Address,
    Envelope,
    Frame,
    LendingMessageError,
    Members,
    decoded,
    encoded,
)
from loong.messages.stray_frames import StrayFrames

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 17
_MAX_UNSENT = 1024  # messages to processes that do not read now


def lending_path(folder: Path, address: Address) -> Path:
    """Return where an engine, or (None) the gManager, takes messages."""
    return folder / ("lending-manager" if address is None else f"lending-{address}")


class LendingSocket:
    """Passes what comes for `address` to `take`. What a receiver has no room for, `retry` sends again."""

    def __init__(self, folder: Path, address: Address | str, take: Callable[[Frame], None]) -> None:
        """Listen in a running event loop. An address that is a text only sends."""
        self._folder, self._take = folder, take
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._strays = StrayFrames("the socket for messages about loans")
        self._unsent: deque[tuple[Address, bytes]] = deque(maxlen=_MAX_UNSENT)
        if not isinstance(address, str):
            path = lending_path(folder, address)
            path.unlink(missing_ok=True)  # left by a process that was killed
            self._socket.bind(str(path))
            asyncio.get_running_loop().add_reader(self._socket, self._read)

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Send messages to their receivers."""
        for envelope in envelopes:
            self._send(envelope.receiver, encoded(envelope))

    def send_members(self, address: Address, members: Members) -> None:
        """Send a process the list of those that are there."""
        self._send(address, encoded(members))

    def retry(self) -> None:
        """Send what could not be sent."""
        unsent, self._unsent = self._unsent, deque(maxlen=_MAX_UNSENT)
        for address, frame in unsent:
            self._send(address, frame, is_late=True)

    def close(self) -> None:
        """Stop listening."""
        with suppress(RuntimeError):  # the loop has ended
            asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _send(self, address: Address, frame: bytes, *, is_late: bool = False) -> None:
        if self._unsent and not is_late:  # messages keep their order
            self._unsent.append((address, frame))
            return
        try:
            self._socket.sendto(frame, str(lending_path(self._folder, address)))
        except BlockingIOError:
            self._unsent.append((address, frame))
        except OSError as error:  # it has ended, or has yet to listen
            logger.debug("no message to %s: %s", address, error)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while frame := self._socket.recv(_MAX_BYTES):
                try:
                    message = decoded(frame)
                except LendingMessageError as error:
                    self._strays.drop("a frame that is no message about loans", str(error))
                else:
                    self._take(message)
