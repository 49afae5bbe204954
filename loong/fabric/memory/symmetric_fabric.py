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
from loong.fabric.lanes import STEP_LANES, Lane
from loong.fabric.memory.arena import Arena, first_epoch, last_epoch
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
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import Exchanging, OpenBatch, OpenInLane, OpenMigration, Pending
from loong.fabric.tensors import is_message
from loong.fabric.traffic import Channel

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
        self._exchanges = {
            lane: LaneExchange(self.arena, lane, channels, make_copy_stream, self.traffic)
            for lane in (Lane.BATCH, *STEP_LANES)
        }
        self._segments = make_copy_stream(self.arena, Lane.MIGRATION)
        self._open_ids: dict[Lane, int | None] = dict.fromkeys(Lane)
        self._num_met, self._meeting = [0] * num_ranks, Lock()
        self.tensor_parallel = ArenaTensorParallel(self.arena, shard_bytes, self.traffic)
        sockets.watch(self._look)

    def wait_for_peers(self) -> None:
        """See Fabric."""
        self._sockets.wait_for_peers()
        for rank in range(self.world.size):
            if self.world.share_host(rank, self._rank):
                self._meet(rank)

    @contextmanager
    def batch(
        self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()
    ) -> Iterator[OpenBatch]:
        """See Fabric."""
        ranks = [rank for i in group for rank in self.world.ranks(i)]
        with (
            self._ending(Lane.BATCH),
            self._sockets.batch(batch_id, group, holders) as by_sockets,
        ):
            holder_ranks = frozenset(map(self._counterpart, holders))
            near = self._begin(Lane.BATCH, batch_id, (*ranks, *holder_ranks))
            self._exchanges[Lane.BATCH].open(batch_id, near)
            self.arena.own_clocks.fill_(first_epoch(batch_id))
            yield _Batch(self, by_sockets, holder_ranks)
            self.check(Lane.BATCH)

    def serve(self, batch_id: int, group: tuple[int, ...]) -> OpenInLane:
        """See Fabric. The caller drains the device before the end.

        The device work of captured steps inside is done, or has failed, soon after the end.
        """
        open_sockets = self._sockets.serve(batch_id, group)
        return lambda lane: self._served(lane, batch_id, group, open_sockets(lane))

    @contextmanager
    def _served(
        self, lane: Lane, batch_id: int, group: tuple[int, ...], served: AbstractContextManager[Exchanging]
    ) -> Iterator[Exchanging]:
        if (open_id := self._open_ids[lane]) is not None:
            raise InvalidMessageError(f"batch {batch_id} is to be served during batch {open_id}")
        with self._ending(lane), served as members:
            self.arena.forget_failures(lane)  # ids of served batches come in any order
            ranks = self._begin(lane, batch_id, list(map(self._counterpart, group)))
            if lane.is_captured:
                self.arena.clock(lane).fill_(first_epoch(batch_id))
            else:
                self._exchanges[lane].open(batch_id, ranks)
            yield _Members(self, members, lane)
            self.check(lane)

    def broadcast(self, payload: Tensor) -> Tensor:
        """See Fabric; the payload is of the host."""
        return self._sockets.broadcast(payload)

    def exchange(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        channel: Channel,
        holders: frozenset[int],
    ) -> Pending:
        """Exchange in the batch that is open, whose holders have these ranks."""
        check = partial(self.check, Lane.BATCH)
        sent = self._messages(outgoing, channel, _TO_HOLDERS.get(channel, channel), holders)
        came = self._messages(incoming, channel, _FROM_HOLDERS.get(channel, channel), holders)
        return self._exchanges[Lane.BATCH].exchange(sent, came, check)

    def exchange_served(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        channel: Channel,
        lane: Lane,
    ) -> Pending:
        """Exchange, in the batch that is served in a lane, with its members."""
        check = partial(self.check, lane)
        check()
        sent = self._messages(outgoing, _FROM_HOLDERS.get(channel, channel))
        came = self._messages(incoming, _TO_HOLDERS.get(channel, channel))
        return self._exchanges[lane].exchange(sent, came, check)

    @contextmanager
    def migration(self, migration_id: int, peer_id: int) -> Iterator[OpenMigration]:
        """See Fabric.

        The caller's device work inside runs concurrently with batches, and is done at the end.
        """
        with (
            self._segments.aside(),
            self._ending(Lane.MIGRATION),
            self._sockets.migration(migration_id, peer_id),
        ):
            peer_rank = self._counterpart(peer_id)
            near = self._begin(Lane.MIGRATION, migration_id, [peer_rank])
            open_channels(self._chunked_channels, Lane.MIGRATION, migration_id)
            signal_opened(self.arena, Lane.MIGRATION, migration_id, near, self._segments)
            yield _Migration(self, peer_rank)
            self._segments.drain()
            self.check(Lane.MIGRATION)

    def send_segment(self, peer_rank: int, tensor: Tensor) -> Pending:
        """Send to the other end of the migration that is open."""
        check = partial(self.check, Lane.MIGRATION)
        check()
        if self._has(tensor):
            self._segments.follow()
            if peer_rank != self._rank:
                self.traffic.count(Channel.SEGMENT, tensor.nbytes)
            by_turns(self._chunked_channels[Channel.SEGMENT].send(self._segments, peer_rank, tensor))
        return DeviceTransfer((self._segments.mark(),), (tensor,), check)

    def receive_segment(self, peer_rank: int, tensor: Tensor) -> Pending:
        """Receive from the other end of the migration that is open."""
        check = partial(self.check, Lane.MIGRATION)
        check()
        if self._has(tensor):
            self._segments.follow()
            by_turns(self._chunked_channels[Channel.SEGMENT].receive(self._segments, peer_rank, tensor))
        return DeviceTransfer((self._segments.mark(),), (tensor,), check)

    def close(self) -> None:
        """See Fabric."""
        self._sockets.close()
        for lane in Lane:
            self.arena.deadline(lane).word[0] = last_epoch(_LAST_ID)
        for lane in Lane:
            for copy_stream in self._copy_streams(lane):
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
    def _ending(self, lane: Lane) -> Iterator[None]:
        """Cancel all transfers in flight when the context ends by an error: they may use the caller's
        memory.
        """
        before = self._open_ids[lane]
        try:
            yield
        except BaseException:
            if (open_id := self._open_ids[lane]) is not None and before is None:
                self.arena.deadline(lane).word[0] = last_epoch(open_id)
                for copy_stream in self._copy_streams(lane):
                    copy_stream.drain()
            raise
        finally:
            self._open_ids[lane] = before

    def _copy_streams(self, lane: Lane) -> Sequence[CopyStream]:
        if lane is Lane.MIGRATION:
            return (self._segments,)
        return () if lane.is_captured else self._exchanges[lane].copy_streams

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

    def check(self, lane: Lane) -> None:
        """Raise if a process failed and a wait of a lane on it has ended. Only then the device is asked."""
        open_id, word = self._open_ids[lane], self.arena.deadline(lane).word
        if open_id is None or not self.arena.gave_up(lane, first_epoch(open_id)):
            return
        self._sockets.raise_if_broken(lane.plane, open_id)
        verb = f"{lane.plane.name.lower()} {open_id}"
        raise DeadlineError(verb, *self.world.place(int(word[1])), self._sockets.deadline)

    def _messages(
        self,
        tensors: Mapping[int, Tensor],
        channel: Channel,
        of_holders: Channel | None = None,
        holders: frozenset[int] = frozenset(),
    ) -> dict[int, Message]:
        """Return the messages by rank, those with `holders` on the channel `of_holders`."""
        by_rank = {self._counterpart(i): tensor for i, tensor in tensors.items() if self._has(tensor)}
        return {
            rank: Message(of_holders if of_holders is not None and rank in holders else channel, tensor)
            for rank, tensor in by_rank.items()
        }

    def _has(self, tensor: Tensor) -> bool:
        return is_message(tensor, self.arena.memory.device)


@dataclass(frozen=True, slots=True)
class _Batch:
    """The batch that is open, and its holders' ranks: an OpenBatch. Control messages are of the host."""

    fabric: SymmetricFabric
    by_sockets: OpenBatch
    holders: frozenset[int]

    @property
    def instance_id(self) -> int:
        """See OpenBatch."""
        return self.by_sockets.instance_id

    def member(self, instance_id: int) -> int:
        """See OpenBatch."""
        return self.by_sockets.member(instance_id)

    def check(self) -> None:
        """See OpenBatch."""
        self.fabric.check(Lane.BATCH)

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Exchanging."""
        self.check()
        if channel is Channel.CONTROL:
            return self.by_sockets.exchange(outgoing, incoming, channel)
        for instance_id in (*outgoing, *incoming):
            self.member(instance_id)  # raises if it is none
        return self.fabric.exchange(outgoing, incoming, channel, self.holders)

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See OpenBatch; the payload is of the host."""
        return self.by_sockets.exchange_control(group, payload)


@dataclass(frozen=True, slots=True)
class _Migration:
    """The migration that is open, and the rank at its other end: an OpenMigration."""

    fabric: SymmetricFabric
    peer_rank: int

    def send(self, tensor: Tensor) -> Pending:
        """See OpenMigration."""
        return self.fabric.send_segment(self.peer_rank, tensor)

    def receive(self, tensor: Tensor) -> Pending:
        """See OpenMigration."""
        return self.fabric.receive_segment(self.peer_rank, tensor)


@dataclass(frozen=True, slots=True)
class _Members:
    """The members of a batch that is served: an Exchanging. Control messages are of the host."""

    fabric: SymmetricFabric
    by_sockets: Exchanging
    lane: Lane

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Exchanging."""
        if channel is Channel.CONTROL:
            return self.by_sockets.exchange(outgoing, incoming, channel)
        return self.fabric.exchange_served(outgoing, incoming, channel, self.lane)
