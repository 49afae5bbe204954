"""Messages of any size through slots of fixed size, between the arenas of any two ranks."""

from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from loong.fabric.memory.arena import Arena, first_epoch
from loong.fabric.memory.copy_streams import CopyStream
from loong.fabric.messages.link import bytes_of
from loong.fabric.traffic import Channel


class ChunkedChannelSize(NamedTuple):
    """The slots from one rank to another. More slots allow more data in flight."""

    num_slots: int
    slot_bytes: int


class ChunkedChannel:
    """One channel between this rank and all ranks, itself included. It sends messages in pieces.

    Pieces are first in, first out. `send` and `receive` handle one piece at each iteration. A piece is pushed
    into a slot of the receiver's arena that only this rank writes to, and signaled by a flag there. The
    receiver copies it, and signals by a flag here that the slot is free. Nothing is sent to a rank before it
    has opened the batch or migration. So all slots are free at the start, even after a failure.
    """

    def __init__(self, arena: Arena, channel: Channel, size: ChunkedChannelSize) -> None:
        self._arena, self._size = arena, size
        self.channel = channel
        num_ranks = arena.world.size
        self._slots = arena.reserve(num_ranks * size.num_slots * size.slot_bytes)  # by source
        self._filled = arena.reserve(8 * num_ranks)  # flags, by source
        self._freed = arena.reserve(8 * num_ranks)  # flags, by receiver
        self._open()

    def apart(self) -> "ChunkedChannel":
        """Return the same channel for another lane, which has other peers: counts are of its own."""
        other = copy(self)
        other._open()
        return other

    def _open(self) -> None:
        self._sent_epoch = self._received_epoch = 0  # the first ones
        self._num_sent = [0] * self._arena.world.size
        self._num_received = [0] * self._arena.world.size

    @staticmethod
    def num_bytes(size: ChunkedChannelSize, num_ranks: int) -> int:
        """Return enough bytes of an arena for one channel."""
        return num_ranks * (size.num_slots * size.slot_bytes + 1024)

    def open_sending(self, batch_or_migration_id: int) -> None:
        """Reset the counts of sent pieces for a new batch or migration."""
        self._sent_epoch = first_epoch(batch_or_migration_id)
        self._num_sent = [0] * len(self._num_sent)

    def open_receiving(self, batch_or_migration_id: int) -> None:
        """Reset the counts of received pieces for a new batch or migration."""
        self._received_epoch = first_epoch(batch_or_migration_id)
        self._num_received = [0] * len(self._num_received)

    def send(self, copy_stream: CopyStream, rank: int, message: Tensor) -> Iterator[None]:
        """Push a contiguous message to a rank with a copy stream, one piece an iteration."""
        for piece in self._pieces(message):
            count, self._num_sent[rank] = self._num_sent[rank], self._num_sent[rank] + 1
            if count == 0:
                opened = self._arena.opening_offset(self.channel.plane) + 8 * rank
                copy_stream.wait(opened, self._sent_epoch, rank)
            elif count >= self._size.num_slots:
                freed = self._sent_epoch + count + 1 - self._size.num_slots
                copy_stream.wait(self._freed + 8 * rank, freed, rank)
            copy_stream.push(piece, rank, self._slot(self._arena.rank, count))
            copy_stream.signal(1 << rank, self._filled + 8 * self._arena.rank, self._sent_epoch + count + 1)
            yield

    def receive(self, copy_stream: CopyStream, rank: int, message: Tensor) -> Iterator[None]:
        """Pull a message of a rank into a contiguous tensor with a copy stream, one piece an iteration."""
        for piece in self._pieces(message):
            count, self._num_received[rank] = self._num_received[rank], self._num_received[rank] + 1
            epoch = self._received_epoch + count + 1
            copy_stream.wait(self._filled + 8 * rank, epoch, rank)
            copy_stream.pull(self._slot(rank, count), piece)
            copy_stream.signal(
                1 << rank, self._freed + 8 * self._arena.rank, self._received_epoch + count + 1
            )
            yield

    def _slot(self, source: int, count: int) -> int:
        """Return the offset of the slot for piece number `count` of a source."""
        num_slots = self._size.num_slots
        return self._slots + (source * num_slots + count % num_slots) * self._size.slot_bytes

    def _pieces(self, message: Tensor) -> Iterator[Tensor]:
        if message.nbytes <= self._size.slot_bytes:
            yield message
        else:
            yield from torch.split(bytes_of(message), self._size.slot_bytes)
