"""The data plane between GPUs of one host: tensors travel between arenas, control messages over sockets.

No verb waits for the device on the host. So `check` finds failures later, and results must not be reported
before that.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock

from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.device_transfer import DeviceTransfer
from loong.fabric.errors import DeadlineError, InvalidMessageError
from loong.fabric.memory.arena import Arena, Clock, Lane, first_epoch, last_epoch
from loong.fabric.memory.arena_tensor_parallel import ArenaTensorParallel
from loong.fabric.memory.chunked_channel import ChunkedChannel, ChunkedChannelSize
from loong.fabric.memory.copy_streams import CopyStream, CopyStreamMaker
from loong.fabric.memory.lane_exchange import (
    LaneExchange,
    Message,
    by_turns,
    open_channels,
    signal_opened,
)
from loong.fabric.memory.shared_memory import SharedMemory
from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.protocol import Exchanging, Pending
from loong.fabric.tensors import is_message
from loong.fabric.traffic import Channel
from loong.fabric.world import neighbours

_LAST_ID = (1 << 38) - 1  # of a batch or a migration: its epochs are the last that a flag can hold
MIB = 1 << 20
SIZES: Mapping[Channel, ChunkedChannelSize] = {
    Channel.RING: ChunkedChannelSize(2, 32 * MIB),
    Channel.QUERIES: ChunkedChannelSize(2, 16 * MIB),
    Channel.PARTIALS: ChunkedChannelSize(2, 16 * MIB),
    Channel.SEGMENT: ChunkedChannelSize(2, 32 * MIB),
    Channel.SERVED_QUERIES: ChunkedChannelSize(2, 8 * MIB),
    Channel.SERVED_PARTIALS: ChunkedChannelSize(2, 8 * MIB),
    Channel.SERVED_KV: ChunkedChannelSize(2, 8 * MIB),
}
_TO_HOLDERS = {Channel.QUERIES: Channel.SERVED_QUERIES, Channel.RING: Channel.SERVED_KV}
_FROM_HOLDERS = {Channel.PARTIALS: Channel.SERVED_PARTIALS}


class SymmetricFabric:
    """Implements Fabric over an arena, for tensors on the arena's device.

    They travel within a host; batches and migrations may have members elsewhere. `sockets` carries control
    messages, and reports members that are lost or have left. The collectives of an instance work on
    `shard_bytes` at a time. `spare_bytes` of the arena are for other users.
    """

    def __init__(
        self,
        sockets: SocketFabric,
        shared: SharedMemory,
        make_copy_stream: CopyStreamMaker,
        *,
        sizes: Mapping[Channel, ChunkedChannelSize] = SIZES,
        shard_bytes: int = 16 * MIB,
        spare_bytes: int = 0,
    ) -> None:
        self.traffic = sockets.traffic
        self.world = sockets.world
        self._sockets, self._rank = sockets, sockets.rank
        num_ranks = self.world.size
        num_bytes = spare_bytes + sum(ChunkedChannel.num_bytes(size, num_ranks) for size in sizes.values())
        num_bytes += ArenaTensorParallel.num_bytes(self.world.tp_size, shard_bytes)
        self.arena = Arena(sockets.directory, self.world, self._rank, shared, num_bytes, sockets.deadline)
        self._chunked_channels = channels = {
            channel: ChunkedChannel(self.arena, channel, size) for channel, size in sizes.items()
        }
        self._batch, self._service = (
            LaneExchange(self.arena, lane, channels, make_copy_stream, self.traffic)
            for lane in (Lane.BATCH, Lane.SERVICE)
        )
        self._segments = make_copy_stream(self.arena, Lane.MIGRATION)
        self._open_ids: dict[Lane, int | None] = dict.fromkeys(Lane)
        self._holders: frozenset[int] = frozenset()  # of the open batch, by rank
        self._num_met, self._meeting = [0] * num_ranks, Lock()
        self._peer_rank = self._rank
        self.tensor_parallel = ArenaTensorParallel(self.arena, shard_bytes, self.traffic)
        sockets.watch(self._look)

    def wait_for_peers(self) -> None:
        """See Fabric."""
        self._sockets.wait_for_peers()
        for rank in range(self.world.size):
            if self.world.share_host(rank, self._rank):
                self._meet(rank)

    @contextmanager
    def batch(self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()) -> Iterator[None]:
        """See Fabric."""
        ranks = [rank for i in group for rank in self.world.ranks(i)]
        with (
            self._ending(Lane.BATCH, self._batch.copy_streams),
            self._sockets.batch(batch_id, group, holders),
        ):
            self._holders = frozenset(map(self._counterpart, holders))
            self._batch.open(batch_id, self._begin(Lane.BATCH, batch_id, (*ranks, *self._holders)))
            self.arena.clocks[: Clock.SERVICE].fill_(first_epoch(batch_id))
            yield
            self.check()

    def serve(self, batch_id: int, group: tuple[int, ...]) -> AbstractContextManager[Exchanging]:
        """See Fabric. One batch at a time is served. The caller drains the device before the end."""
        return self._serving(Lane.SERVICE, batch_id, group)

    def serve_lease(self, batch_id: int, group: tuple[int, ...]) -> AbstractContextManager[Exchanging]:
        """See Fabric. One lease at a time is served, during a batch of `serve`.

        The caller's device work inside is done, or has failed, soon after the end.
        """
        return self._serving(Lane.SERVED_LEASE, batch_id, group)

    def _serving(
        self, lane: Lane, batch_id: int, group: tuple[int, ...]
    ) -> AbstractContextManager[Exchanging]:
        return self._served(lane, batch_id, group, self._sockets.serve(batch_id, group))

    @contextmanager
    def _served(
        self, lane: Lane, batch_id: int, group: tuple[int, ...], served: AbstractContextManager[Exchanging]
    ) -> Iterator[Exchanging]:
        if (open_id := self._open_ids[lane]) is not None:
            raise InvalidMessageError(f"batch {batch_id} is to be served during batch {open_id}")
        copy_streams = self._service.copy_streams if lane is Lane.SERVICE else ()
        with self._ending(lane, copy_streams), served as members:
            self.arena.forget_failures(lane)  # ids of served batches come in any order
            ranks = self._begin(lane, batch_id, list(map(self._counterpart, group)))
            if lane is Lane.SERVICE:
                self._service.open(batch_id, ranks)
            else:
                self.arena.clocks[Clock.SERVICE] = first_epoch(batch_id)
            yield _Members(self, members)
            self._check(lane)

    def check(self) -> None:
        """See Fabric."""
        self._check(Lane.BATCH)

    def ring_step(self, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor) -> Pending:
        """See Fabric."""
        following, previous = neighbours(ring, self.world.instance_id(self._rank))
        return self.exchange({following: outgoing}, {previous: incoming}, Channel.RING)

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Fabric. Control messages are of the host."""
        self.check()
        if channel is Channel.CONTROL:
            return self._sockets.exchange(outgoing, incoming, channel)
        for instance_id in (*outgoing, *incoming):
            self._sockets.member(instance_id)  # raises if it is none
        sent = self._messages(outgoing, channel, _TO_HOLDERS.get(channel, channel))
        came = self._messages(incoming, channel, _FROM_HOLDERS.get(channel, channel))
        return self._batch.exchange(sent, came, self.check)

    def exchange_served(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """Exchange, in the batch that is served, with its members."""
        check = partial(self._check, Lane.SERVICE)
        check()
        sent = self._messages(outgoing, _FROM_HOLDERS.get(channel, channel))
        came = self._messages(incoming, _TO_HOLDERS.get(channel, channel))
        return self._service.exchange(sent, came, check)

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See Fabric; the payload is of the host."""
        return self._sockets.exchange_control(group, payload)

    @contextmanager
    def migration(self, migration_id: int, peer_id: int) -> Iterator[None]:
        """See Fabric.

        The caller's device work inside runs concurrently with batches, and is done at the end.
        """
        with (
            self._segments.aside(),
            self._ending(Lane.MIGRATION, (self._segments,)),
            self._sockets.migration(migration_id, peer_id),
        ):
            self._peer_rank = self._counterpart(peer_id)
            near = self._begin(Lane.MIGRATION, migration_id, [self._peer_rank])
            open_channels(self._chunked_channels, Lane.MIGRATION, migration_id)
            signal_opened(self.arena, Lane.MIGRATION, migration_id, near, self._segments)
            yield
            self._segments.drain()
            self._check(Lane.MIGRATION)

    def send_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        self._check_migration()
        if self._has(tensor):
            self._segments.follow()
            if self._peer_rank != self._rank:
                self.traffic.count(Channel.SEGMENT, tensor.nbytes)
            by_turns(self._chunked_channels[Channel.SEGMENT].send(self._segments, self._peer_rank, tensor))
        return DeviceTransfer((self._segments.mark(),), (tensor,), self._check_migration)

    def receive_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        self._check_migration()
        if self._has(tensor):
            self._segments.follow()
            by_turns(self._chunked_channels[Channel.SEGMENT].receive(self._segments, self._peer_rank, tensor))
        return DeviceTransfer((self._segments.mark(),), (tensor,), self._check_migration)

    def close(self) -> None:
        """See Fabric."""
        self._sockets.close()
        for lane in Lane:
            self.arena.deadline(lane).word[0] = last_epoch(_LAST_ID)
        for copy_stream in (*self._batch.copy_streams, *self._service.copy_streams, self._segments):
            copy_stream.close()
        self.arena.close()

    def _meet(self, rank: int) -> None:
        """Map the memory of a process that has joined, or joined again. For any thread."""
        with self._meeting:
            num_joins = self._sockets.num_joins(rank)
            if num_joins != self._num_met[rank]:
                self.arena.meet(rank)
                self._num_met[rank] = num_joins

    def _counterpart(self, instance_id: int) -> int:
        return self.world.rank(instance_id, self.world.tp_rank(self._rank))

    def _begin(self, lane: Lane, batch_or_migration_id: int, ranks: Sequence[int]) -> list[int]:
        """Note what is open in a lane. Return those of its ranks that map this arena."""
        near = [rank for rank in ranks if self.world.share_host(rank, self._rank)]
        for rank in near:
            self._meet(rank)
        self._open_ids[lane] = batch_or_migration_id
        self._look()  # for losses that were reported before this batch was open
        return near

    @contextmanager
    def _ending(self, lane: Lane, copy_streams: Sequence[CopyStream]) -> Iterator[None]:
        """Cancel all transfers in flight when the context ends by an error: they may use the caller's
        memory.
        """
        before = self._open_ids[lane]
        try:
            yield
        except BaseException:
            if (open_id := self._open_ids[lane]) is not None and before is None:
                self.arena.deadline(lane).word[0] = last_epoch(open_id)
                for copy_stream in copy_streams:
                    copy_stream.drain()
            raise
        finally:
            self._open_ids[lane] = before

    def _look(self) -> None:
        """End the waits of open batches and migrations that a lost or absent process takes part in.

        For any thread.
        """
        for lane, open_id in self._open_ids.items():
            if open_id is None:
                continue
            try:
                self._sockets.raise_if_broken(lane.plane, open_id)
            except ClusterError:
                self.arena.deadline(lane).word[0] = last_epoch(open_id)

    def _check(self, lane: Lane) -> None:
        """Raise if a process failed and a wait on it has ended. Only then the device is asked."""
        open_id, word = self._open_ids[lane], self.arena.deadline(lane).word
        if open_id is None or not self.arena.gave_up(lane, first_epoch(open_id)):
            return
        self._sockets.raise_if_broken(lane.plane, open_id)
        verb = f"{lane.plane.name.lower()} {open_id}"
        raise DeadlineError(verb, *self.world.place(int(word[1])), self._sockets.deadline)

    def _check_migration(self) -> None:
        if self._open_ids[Lane.MIGRATION] is None:
            raise InvalidMessageError("no migration is open: segments need `with fabric.migration(...)`")
        self._check(Lane.MIGRATION)

    def _messages(
        self, tensors: Mapping[int, Tensor], channel: Channel, of_holders: Channel | None = None
    ) -> dict[int, Message]:
        """Return the messages by rank, those with holders of the open batch on the channel `of_holders`."""
        by_rank = {self._counterpart(i): tensor for i, tensor in tensors.items() if self._has(tensor)}
        return {
            rank: Message(of_holders if of_holders is not None and rank in self._holders else channel, tensor)
            for rank, tensor in by_rank.items()
        }

    def _has(self, tensor: Tensor) -> bool:
        return is_message(tensor, self.arena.memory.device)


@dataclass(frozen=True, slots=True)
class _Members:
    """The members of a batch that is served: an Exchanging. Control messages are of the host."""

    fabric: SymmetricFabric
    by_sockets: Exchanging

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Exchanging."""
        if channel is Channel.CONTROL:
            return self.by_sockets.exchange(outgoing, incoming, channel)
        return self.fabric.exchange_served(outgoing, incoming, channel)
