"""The exchanges of one lane: messages of a batch through chunked channels, by copy streams of its own."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from loong.fabric.device_transfer import DeviceTransfer
from loong.fabric.lanes import Lane
from loong.fabric.memory.arena import Arena, first_epoch
from loong.fabric.memory.chunked_channel import ChunkedChannel
from loong.fabric.memory.copy_streams import CopyStream, CopyStreamMaker
from loong.fabric.protocol import Pending
from loong.fabric.traffic import Channel, Traffic


class Message(NamedTuple):
    """A tensor that travels to or from one rank."""

    channel: Channel
    tensor: Tensor


class LaneExchange:
    """Sends and receives by a copy stream each, for one thread.

    Members of a batch and its holders exchange alike. Each is in a lane of its own, on its own side of the
    channels between them.
    """

    def __init__(
        self,
        arena: Arena,
        lane: Lane,
        channels: Mapping[Channel, ChunkedChannel],
        make_copy_stream: CopyStreamMaker,
        traffic: Traffic,
    ) -> None:
        self._arena, self._lane, self._traffic = arena, lane, traffic
        self._channels = {name: channel.apart() for name, channel in channels.items()}
        self._out, self._in = make_copy_stream(arena, lane), make_copy_stream(arena, lane)

    @property
    def copy_streams(self) -> tuple[CopyStream, ...]:
        """The copy streams of the lane."""
        return self._out, self._in

    def open(self, batch_id: int, ranks: Iterable[int]) -> None:
        """Open a batch to writes of these ranks, after all earlier work is done."""
        open_channels(self._channels, self._lane, batch_id)
        signal_opened(self._arena, self._lane, batch_id, ranks, self._in)

    def exchange(
        self, outgoing: Mapping[int, Message], incoming: Mapping[int, Message], check: Callable[[], None]
    ) -> Pending:
        """Send and receive one message for each named rank. The result's `wait` calls `check`.

        All ranks order their peers by distance, so no two wait for each other. Sends and receives alternate
        piece by piece: a copy stream's queue is bounded, and the host waits at a full one until a peer has
        received.
        """
        self._out.follow()
        self._in.follow()
        num_ranks, rank = self._arena.world.size, self._arena.rank
        for distance in range(num_ranks):
            to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
            sending = self._sending(to, outgoing[to]) if to in outgoing else ()
            receiving = self._receiving(source, incoming[source]) if source in incoming else ()
            by_turns(sending, receiving)
        tensors = [message.tensor for message in (*outgoing.values(), *incoming.values())]
        return DeviceTransfer((self._out.mark(), self._in.mark()), tensors, check)

    def _sending(self, rank: int, message: Message) -> Iterator[None]:
        if rank != self._arena.rank:
            self._traffic.count(message.channel, message.tensor.nbytes)
        return self._channels[message.channel].send(self._out, rank, message.tensor)

    def _receiving(self, rank: int, message: Message) -> Iterator[None]:
        return self._channels[message.channel].receive(self._in, rank, message.tensor)


def open_channels(channels: Mapping[Channel, ChunkedChannel], lane: Lane, batch_or_migration_id: int) -> None:
    """Open the channels of a lane, or its ends of those between two planes."""
    for channel, chunked_channel in channels.items():
        if channel.source_plane is lane.plane:
            chunked_channel.open_sending(batch_or_migration_id)
        if channel.plane is lane.plane:
            chunked_channel.open_receiving(batch_or_migration_id)


def signal_opened(
    arena: Arena, lane: Lane, batch_or_migration_id: int, ranks: Iterable[int], copy_stream: CopyStream
) -> None:
    """Let ranks write, once all earlier work of the copy stream and its caller is done."""
    copy_stream.follow()
    offset = arena.opening_offset(lane.plane) + 8 * arena.rank
    copy_stream.signal(sum(1 << rank for rank in ranks), offset, first_epoch(batch_or_migration_id))


def by_turns(*transfers: Iterable[None]) -> None:
    """Advance all iterators in turn until all are exhausted."""
    for _ in zip_longest(*transfers):
        pass
