"""One connection to one peer. One thread receives frames, and another sends large ones."""

import socket
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock, Thread

import torch
from torch import Tensor

from loong.fabric.errors import DeadlineError, InvalidMessageError, PeerLostError
from loong.fabric.messages.mailbox import Address, MessageQueue
from loong.fabric.traffic import Channel
from loong.fabric.world import World

_FRAME = struct.Struct("<QQQ")  # channel, batch or migration id, bytes that follow
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_LARGEST_PROMPT_BYTES = 128 << 10  # fits a socket's buffer; sending costs as little as posting to a thread
_LARGEST_FRAME_BYTES = 64 << 30  # more than any message; a larger size means a damaged header


class Link:
    """A connection whose other end is the process `rank`.

    The reader never stops reading, so a sender depends on a running receiver process, not on its calls.
    Frames are sent in the order of the calls. The caller's thread sends a small frame itself, unless a large
    one is still in the sender thread.
    """

    def __init__(
        self, world: World, rank: int, connection: socket.socket, mailbox: MessageQueue, deadline: float
    ) -> None:
        self.rank = rank
        self.is_lost = False
        self._peer = world.place(rank)
        self._connection = connection
        self._mailbox = mailbox
        self._deadline = deadline
        self._ordering = Lock()
        self._sender = ThreadPoolExecutor(1, f"fabric-to-{rank}")  # its thread starts with the first post
        self._last_post: Future[None] | None = None
        seconds, fraction = divmod(deadline, 1)
        timeval = _TIMEVAL.pack(int(seconds), int(fraction * 1e6))
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._reader = Thread(target=self._read_until_lost, name=f"fabric-from-{rank}", daemon=True)
        self._reader.start()

    def send(self, address: Address, payload: memoryview) -> Future[None] | None:
        """Send one frame. Its payload may be reused when the future is done, or at once without a future.

        Raises, here or by the future, PeerLostError, or DeadlineError if the peer stopped reading. The link
        is then cut, because half a frame may be sent. Raises InvalidMessageError beyond 64 GiB.
        """
        if len(payload) > _LARGEST_FRAME_BYTES:
            raise InvalidMessageError(
                f"{address.verb}: {len(payload)} bytes, but a frame holds {_LARGEST_FRAME_BYTES}"
            )
        with self._ordering:
            if self.is_lost:
                raise PeerLostError(address.verb, *self._peer)
            is_idle = self._last_post is None or self._last_post.done()
            if is_idle and len(payload) <= _LARGEST_PROMPT_BYTES:
                self._send_frame(address, payload)
                return None
            self._last_post = self._sender.submit(self._send_frame, address, payload)
            return self._last_post

    def cut(self) -> None:
        """Stop both directions at once. The readers of both ends notice it."""
        with suppress(OSError):  # the peer may have closed first
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut the link and wait for its threads to end."""
        self.cut()
        self._reader.join()
        with self._ordering:  # later senders find the link lost
            self._sender.shutdown()
        self._connection.close()

    def _send_frame(self, address: Address, payload: memoryview) -> None:
        header = _FRAME.pack(address.channel, address.batch_or_migration_id, len(payload))
        try:
            self._send_all(header, payload)
        except BlockingIOError as error:
            self.cut()
            raise DeadlineError(address.verb, *self._peer, self._deadline) from error
        except OSError as error:
            raise PeerLostError(address.verb, *self._peer) from error

    def _send_all(self, header: bytes, payload: memoryview) -> None:
        num_sent = 0
        while num_sent < len(header) + len(
            payload
        ):  # a signal, or the deadline, may end a call in the middle
            rest = payload[max(0, num_sent - len(header)) :]
            num_sent += self._connection.sendmsg([header[num_sent:], rest])  # raises if none left in time

    def _read_until_lost(self) -> None:
        try:
            with suppress(OSError, EOFError, ValueError):  # gone, or not a valid frame: the link is lost
                while True:
                    self._read_frame()
        finally:  # after any end of the reader, no one waits for it
            self.is_lost = True
            self.cut()
            self._mailbox.wake()

    def _read_frame(self) -> None:
        header = bytearray(_FRAME.size)
        self._fill(memoryview(header))
        channel, batch_or_migration_id, num_bytes = _FRAME.unpack(header)
        if num_bytes > _LARGEST_FRAME_BYTES:
            raise ValueError(f"a frame of {num_bytes} bytes, but at most {_LARGEST_FRAME_BYTES} are allowed")
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        self._fill(memory_of(payload))
        self._mailbox.deliver(Address(Channel(channel), batch_or_migration_id, self.rank), payload)

    def _fill(self, view: memoryview) -> None:
        while view:
            num_bytes = self._connection.recv_into(view)
            if num_bytes == 0:
                raise EOFError
            view = view[num_bytes:]


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as uint8 [num_bytes], shared."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, shared."""
    return bytes_of(tensor).numpy().data
