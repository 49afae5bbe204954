"""The data plane between GPUs of one host: tensors travel between arenas, control messages over sockets.

No verb waits for the device on the host. So `check` finds failures later, and results must not be reported
before that.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from threading import Lock

from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.device_transfer import DeviceTransfer
from loong.fabric.errors import DeadlineError, InvalidMessageError
from loong.fabric.memory.arena import Arena, Clock, first_epoch, last_epoch
from loong.fabric.memory.arena_tensor_parallel import ArenaTensorParallel
from loong.fabric.memory.chunked_channel import ChunkedChannel, ChunkedChannelSize
from loong.fabric.memory.copy_streams import CopyStream, CopyStreamMaker
from loong.fabric.memory.shared_memory import SharedMemory
from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.protocol import Exchanging, Pending
from loong.fabric.tensors import is_message
from loong.fabric.traffic import Channel, Plane
from loong.fabric.world import neighbours

_LAST_ID = (1 << 38) - 1  # of a batch or a migration: its epochs are the last that a flag can hold
MIB = 1 << 20
SIZES: Mapping[Channel, ChunkedChannelSize] = {
    Channel.RING: ChunkedChannelSize(2, 32 * MIB),
    Channel.QUERIES: ChunkedChannelSize(2, 2 * MIB),
    Channel.PARTIALS: ChunkedChannelSize(2, 2 * MIB),
    Channel.SEGMENT: ChunkedChannelSize(2, 32 * MIB),
}


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
        self._chunked_channels = {
            channel: ChunkedChannel(self.arena, channel, size) for channel, size in sizes.items()
        }
        self._out, self._in = (
            make_copy_stream(self.arena, Plane.BATCH),
            make_copy_stream(self.arena, Plane.BATCH),
        )
        self._segments = make_copy_stream(self.arena, Plane.MIGRATION)
        self._open_ids: dict[Plane, int | None] = dict.fromkeys(Plane)
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
        """See Fabric. Holders serve captured leases; of the verbs, only control messages reach them."""
        ranks = [rank for i in group for rank in self.world.ranks(i)]
        with self._ending(Plane.BATCH, (self._out, self._in)), self._sockets.batch(batch_id, group, holders):
            for instance_id in holders:
                self._meet(self._counterpart(instance_id))
            self._open(Plane.BATCH, batch_id, ranks, self._in)
            self.arena.clocks[: Clock.SERVICE].fill_(first_epoch(batch_id))
            yield
            self.check()

    def serve(self, batch_id: int, group: tuple[int, ...]) -> AbstractContextManager[Exchanging]:
        """See Fabric. One batch at a time is served, and only control messages come from its members.

        The caller's device work inside is done, or has failed, soon after the end.
        """
        return self._serving(batch_id, group, self._sockets.serve(batch_id, group))

    @contextmanager
    def _serving(
        self, batch_id: int, group: tuple[int, ...], served: AbstractContextManager[Exchanging]
    ) -> Iterator[Exchanging]:
        with self._ending(Plane.SERVICE, ()), served as members:
            for instance_id in group:
                self._meet(self._counterpart(instance_id))
            self._open_ids[Plane.SERVICE] = batch_id
            self.arena.clocks[Clock.SERVICE] = first_epoch(batch_id)
            yield members
            self._check(Plane.SERVICE)

    def check(self) -> None:
        """See Fabric."""
        self._check(Plane.BATCH)

    def ring_step(self, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor) -> Pending:
        """See Fabric."""
        following, previous = neighbours(ring, self.world.instance_id(self._rank))
        return self.exchange({following: outgoing}, {previous: incoming}, Channel.RING)

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Fabric. All ranks order their peers by distance, so no two wait for each other.

        Sends and receives alternate piece by piece: a copy stream's queue is bounded, and the host waits at a
        full one until a peer has received. Control messages are of the host.
        """
        self.check()
        if channel is Channel.CONTROL:
            return self._sockets.exchange(outgoing, incoming, channel)
        sent = {self._sockets.member(i): tensor for i, tensor in outgoing.items() if self._has(tensor)}
        come = {self._sockets.member(i): tensor for i, tensor in incoming.items() if self._has(tensor)}
        self._out.follow()
        self._in.follow()
        for distance in range(self.world.size):
            to, source = (self._rank + distance) % self.world.size, (self._rank - distance) % self.world.size
            sending = self._sending(channel, self._out, to, sent[to]) if to in sent else ()
            receiving = (
                self._chunked_channels[channel].receive(self._in, source, come[source])
                if source in come
                else ()
            )
            _by_turns(sending, receiving)
        return DeviceTransfer(
            (self._out.mark(), self._in.mark()), (*sent.values(), *come.values()), self.check
        )

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
            self._ending(Plane.MIGRATION, (self._segments,)),
            self._sockets.migration(migration_id, peer_id),
        ):
            self._peer_rank = self._counterpart(peer_id)
            self._open(Plane.MIGRATION, migration_id, [self._peer_rank], self._segments)
            yield
            self._segments.drain()
            self._check(Plane.MIGRATION)

    def send_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        self._check_migration()
        if self._has(tensor):
            self._segments.follow()
            _by_turns(self._sending(Channel.SEGMENT, self._segments, self._peer_rank, tensor))
        return DeviceTransfer((self._segments.mark(),), (tensor,), self._check_migration)

    def receive_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        self._check_migration()
        if self._has(tensor):
            self._segments.follow()
            _by_turns(
                self._chunked_channels[Channel.SEGMENT].receive(self._segments, self._peer_rank, tensor)
            )
        return DeviceTransfer((self._segments.mark(),), (tensor,), self._check_migration)

    def close(self) -> None:
        """See Fabric."""
        self._sockets.close()
        for plane in Plane:
            self.arena.deadline(plane).word[0] = last_epoch(_LAST_ID)
        for copy_stream in (self._out, self._in, self._segments):
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

    def _sending(
        self, channel: Channel, copy_stream: CopyStream, rank: int, tensor: Tensor
    ) -> Iterator[None]:
        if rank != self._rank:
            self.traffic.count(channel, tensor.nbytes)
        return self._chunked_channels[channel].send(copy_stream, rank, tensor)

    def _open(
        self, plane: Plane, batch_or_migration_id: int, ranks: Sequence[int], copy_stream: CopyStream
    ) -> None:
        """Open a batch or migration to writes of the others, after all earlier work is done."""
        near = [rank for rank in ranks if self.world.share_host(rank, self._rank)]
        for rank in near:
            self._meet(rank)
        self._open_ids[plane] = batch_or_migration_id
        self._look()  # for losses that were reported before this batch was open
        for channel, chunked_channels in self._chunked_channels.items():
            if channel.plane is plane:
                chunked_channels.open(batch_or_migration_id)
        copy_stream.follow()
        offset = self.arena.opening_offset(plane) + 8 * self._rank
        copy_stream.signal(sum(1 << rank for rank in near), offset, first_epoch(batch_or_migration_id))

    @contextmanager
    def _ending(self, plane: Plane, copy_streams: Sequence[CopyStream]) -> Iterator[None]:
        """Cancel all transfers in flight when the context ends by an error: they may use the caller's
        memory.
        """
        before = self._open_ids[plane]
        try:
            yield
        except BaseException:
            if (open_id := self._open_ids[plane]) is not None and before is None:
                self.arena.deadline(plane).word[0] = last_epoch(open_id)
                for copy_stream in copy_streams:
                    copy_stream.drain()
            raise
        finally:
            self._open_ids[plane] = before

    def _look(self) -> None:
        """End the waits of open batches and migrations that a lost or absent process takes part in.

        For any thread.
        """
        for plane, open_id in self._open_ids.items():
            if open_id is None:
                continue
            try:
                self._sockets.raise_if_broken(plane)
            except ClusterError:
                self.arena.deadline(plane).word[0] = last_epoch(open_id)

    def _check(self, plane: Plane) -> None:
        """Raise if a process failed and a wait on it has ended. Only then the device is asked."""
        open_id, word = self._open_ids[plane], self.arena.deadline(plane).word
        if open_id is None or not self.arena.gave_up(plane, first_epoch(open_id)):
            return
        self._sockets.raise_if_broken(plane)
        verb = f"{plane.name.lower()} {open_id}"
        raise DeadlineError(verb, *self.world.place(int(word[1])), self._sockets.deadline)

    def _check_migration(self) -> None:
        if self._open_ids[Plane.MIGRATION] is None:
            raise InvalidMessageError("no migration is open: segments need `with fabric.migration(...)`")
        self._check(Plane.MIGRATION)

    def _has(self, tensor: Tensor) -> bool:
        return is_message(tensor, self.arena.memory.device)


def _by_turns(*transfers: Iterable[None]) -> None:
    """Advance all iterators in turn until all are exhausted."""
    for _ in zip_longest(*transfers):
        pass
