"""The data plane between CPU processes: Unix sockets within a host, TCP between hosts."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.errors import AbandonedError, InvalidMessageError, PeerLostError
from loong.fabric.messages.link import Link, bytes_of, memory_of
from loong.fabric.messages.mailbox import Address, MessageQueue
from loong.fabric.messages.message_transfer import MessageTransfer
from loong.fabric.messages.network import Network
from loong.fabric.messages.peer_registry import PeerRegistry
from loong.fabric.protocol import Exchanging, Pending
from loong.fabric.tensor_parallel import TensorParallelGroup
from loong.fabric.tensors import is_message
from loong.fabric.traffic import Channel, Plane, Traffic
from loong.fabric.world import World, neighbours

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Batch:
    """The open batch, and the processes whose loss ends it."""

    batch_id: int
    group: tuple[int, ...]
    links: Mapping[int, Link]  # by rank, without this process
    holders: Mapping[int, Link]  # by rank, those that serve it
    is_served: bool = False  # by this process, which is not a member

    @property
    def peers(self) -> Collection[Link]:
        """The processes whose loss ends the batch here."""
        return (*self.links.values(), *self.holders.values())


@dataclass(frozen=True, slots=True)
class _Migration:
    """The open migration, and the process at its other end."""

    migration_id: int
    link: Link


class SocketFabric:
    """Implements Fabric for `rank` of `world`.

    The processes of a host meet in `directory`, which must exist, be private to this user and have a short
    path. Its creator removes it. Those of several hosts need a `network`. The constructor connects to all
    processes that are there; later processes connect to it.
    """

    arena = None

    def __init__(
        self, directory: Path, world: World, rank: int, *, deadline: float, network: Network | None = None
    ) -> None:
        self.traffic = Traffic()
        self.directory = directory
        self.world = world
        self.rank = rank
        self.deadline = deadline
        self.address = None if network is None else network.address
        self._instance_id = world.instance_id(rank)
        self._mailbox = MessageQueue(world)
        self._peer_registry = PeerRegistry(directory, world, rank, self._mailbox, deadline, network)
        self._open_batch: _Batch | None = None
        self._open_migration: _Migration | None = None
        self._served: dict[int | None, _Batch] = {}  # by id
        self.tensor_parallel = TensorParallelGroup(world.tp_rank(rank), world.tp_size, self._gather_shards)

    def wait_for_peers(self) -> None:
        """Return once the whole world has joined. DeadlineError names a missing process."""
        self._peer_registry.wait_for_all(range(self.world.size))

    def wait_for_instance(self) -> None:
        """Return once all ranks of this instance have joined. DeadlineError names a missing process."""
        self._peer_registry.wait_for_all(self.world.ranks(self._instance_id))

    @contextmanager
    def batch(self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()) -> Iterator[None]:
        """See Fabric."""
        if self._open_batch is not None:
            raise InvalidMessageError(f"batch {batch_id} opened inside batch {self._open_batch.batch_id}")
        if self._instance_id not in group:
            raise InvalidMessageError(f"instance {self._instance_id} opened a batch of {group}")
        ranks = [rank for i in group for rank in self.world.ranks(i) if rank != self.rank]
        links = {rank: self._peer_registry.link(rank, Plane.BATCH, f"batch {batch_id}") for rank in ranks}
        served, lost = self._service_links(batch_id, holders)
        batch = _Batch(batch_id, group, links, served)
        self._mailbox.open(Plane.BATCH, batch_id)
        with self._opened(Plane.BATCH, batch_id, links.values()), self._reporting_to_holders(batch):
            _raise_lost(lost)
            self._open_batch = batch
            try:
                yield
            finally:
                self._open_batch = None

    def serve(self, batch_id: int, group: tuple[int, ...]) -> AbstractContextManager[Exchanging]:
        """See Fabric."""
        links, lost = self._service_links(batch_id, group)
        batch = _Batch(batch_id, group, links, {}, is_served=True)
        self._mailbox.open(Plane.SERVICE, batch_id)
        return self._serving(batch, lost)

    serve_lease = serve

    @contextmanager
    def _serving(self, batch: _Batch, lost: PeerLostError | None) -> Iterator[Exchanging]:
        self._served[batch.batch_id] = batch
        try:
            _raise_lost(lost)
            yield _Served(self, batch)
        except BaseException:
            self._abandon(Address(Channel.BATCH_ABANDONED, batch.batch_id, self.rank), batch.links.values())
            raise
        finally:
            del self._served[batch.batch_id]
            self._mailbox.close(Plane.SERVICE, batch.batch_id)

    @contextmanager
    def _reporting_to_holders(self, batch: _Batch) -> Iterator[None]:
        """Report an early end of a batch to its holders, which do not know all of its members."""
        try:
            yield
        except BaseException:
            address = Address(Channel.SERVICE_ABANDONED, batch.batch_id, self.rank)
            self._abandon(address, batch.holders.values())
            raise

    def _service_links(
        self, batch_id: int, instance_ids: tuple[int, ...]
    ) -> tuple[Mapping[int, Link], PeerLostError | None]:
        """Return the links to those of these instances that are there, and the error of one that is not."""
        links: dict[int, Link] = {}
        lost: PeerLostError | None = None
        for rank in map(self._counterpart, instance_ids):
            try:
                links[rank] = self._peer_registry.link(rank, Plane.SERVICE, f"batch {batch_id}")
            except PeerLostError as error:
                lost = error
        return links, lost

    def ring_step(self, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor) -> Pending:
        """See Fabric."""
        following, previous = neighbours(ring, self._instance_id)
        return self.exchange({following: outgoing}, {previous: incoming}, Channel.RING)

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Fabric."""
        return self._exchange_in(self._current_batch(), outgoing, incoming, channel)

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See Fabric."""
        received = {instance_id: torch.empty_like(payload) for instance_id in group}
        is_speaker = self.world.tp_rank(self.rank) == 0
        listeners = [rank for i in group for rank in self.world.ranks(i)] if is_speaker else []
        speakers = {self.world.rank(i, 0): tensor for i, tensor in received.items()}
        batch = self._current_batch()
        self._exchange_ranks(batch, dict.fromkeys(listeners, payload), speakers, Channel.CONTROL).wait()
        return received

    @contextmanager
    def migration(self, migration_id: int, peer_id: int) -> Iterator[None]:
        """See Fabric."""
        if self._open_migration is not None:
            raise InvalidMessageError(
                f"migration {migration_id} opened inside migration {self._open_migration.migration_id}"
            )
        link = self._peer_registry.link(
            self._counterpart(peer_id), Plane.MIGRATION, f"migration {migration_id}"
        )
        self._mailbox.open(Plane.MIGRATION, migration_id)
        with self._opened(Plane.MIGRATION, migration_id, [link]):
            self._open_migration = _Migration(migration_id, link)
            try:
                yield
            finally:
                self._open_migration = None

    def send_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        migration = self._current_migration()
        address = Address(Channel.SEGMENT, migration.migration_id, self.rank)
        self._mailbox.check(address, (migration.link,))
        sent = self._send(migration.link, address, tensor) if is_message(tensor, _HOST) else None
        return MessageTransfer(self._mailbox, (sent,) if sent else (), (), (), self.deadline)

    def receive_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        migration = self._current_migration()
        address = Address(Channel.SEGMENT, migration.migration_id, migration.link.rank)
        incoming = ((address, tensor),) if is_message(tensor, _HOST) else ()
        return MessageTransfer(self._mailbox, (), incoming, (migration.link,), self.deadline)

    def check(self) -> None:
        """See Fabric. A failed wait raises at once here, so there is nothing left to check."""

    def close(self) -> None:
        """See Fabric."""
        self._peer_registry.close()

    def watch(self, report: Callable[[], None]) -> None:
        """Call `report`, from any thread, whenever `raise_if_broken` may have a new error."""
        self._mailbox.watch(report)

    def raise_if_broken(self, plane: Plane, served_id: int | None = None) -> None:
        """Raise the error of a wait if a member of the open batch or migration is lost or has left.

        In the plane of the service, if a member of the served batch `served_id` is or has.
        """
        if plane is Plane.BATCH and (batch := self._open_batch) is not None:
            self._mailbox.check(Address(Channel.CONTROL, batch.batch_id, self.rank), batch.peers)
        if plane is Plane.MIGRATION and (migration := self._open_migration) is not None:
            address = Address(Channel.SEGMENT, migration.migration_id, migration.link.rank)
            self._mailbox.check(address, (migration.link,))
        if plane is Plane.SERVICE and (served := self._served.get(served_id)) is not None:
            self._mailbox.check(Address(Channel.SERVED_CONTROL, served.batch_id, self.rank), served.peers)

    def member(self, instance_id: int) -> int:
        """Return the rank of an instance's process in the open batch that this process talks to, or its
        own.
        """
        batch, rank = self._current_batch(), self._counterpart(instance_id)
        return rank if rank == self.rank else self._link_in(batch, rank).rank

    def post(self, channel: Channel, its_id: int, rank: int, payload: Tensor) -> None:
        """Send a message of the host that is not counted as traffic."""
        address = Address(channel, its_id, self.rank)
        self._peer_registry.link(rank, channel.plane, address.verb).send(address, memory_of(payload))

    def receive(self, channel: Channel, its_id: int, rank: int) -> Tensor:
        """Return the next message (uint8 [num_bytes]) that `rank` has posted.

        Raises the errors of a wait in the open batch or migration.
        """
        address, batch, migration = Address(channel, its_id, rank), self._open_batch, self._open_migration
        peers: Collection[Link] = (self._peer_registry.link(rank, channel.plane, address.verb),)
        if channel is Channel.BATCH_LINK and batch is not None:
            peers = batch.peers
        elif channel is Channel.MIGRATION_LINK and migration is not None:
            peers = (migration.link,)
        return self._mailbox.take(address, peers, self.deadline)

    @property
    def num_stray_frames(self) -> int:
        """The number of frames dropped while peers joined."""
        return self._peer_registry.strays.num_dropped

    def num_joins(self, rank: int) -> int:
        """Return how often a peer has joined."""
        return self._peer_registry.num_joins(rank)

    def _exchange_in(
        self, batch: _Batch, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        return self._exchange_ranks(
            batch,
            {self._counterpart(i): tensor for i, tensor in outgoing.items()},
            {self._counterpart(i): tensor for i, tensor in incoming.items()},
            channel,
        )

    def _exchange_ranks(
        self, batch: _Batch, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        own = Address(channel, batch.batch_id, self.rank)
        arriving = channel.served if batch.is_served and incoming else channel
        on_their_way = []
        for rank, tensor in outgoing.items():
            if not is_message(tensor, _HOST):
                continue
            if rank == self.rank:
                self._mailbox.deliver(own, bytes_of(tensor).clone())
                continue
            is_holder = rank in batch.holders
            address = own._replace(channel=channel.served) if is_holder else own
            if sent := self._send(self._link_in(batch, rank), address, tensor):
                on_their_way.append(sent)
        expected = tuple(
            (Address(arriving, batch.batch_id, rank), tensor)
            for rank, tensor in incoming.items()
            if is_message(tensor, _HOST)
        )
        return MessageTransfer(self._mailbox, tuple(on_their_way), expected, batch.peers, self.deadline)

    @contextmanager
    def _opened(self, plane: Plane, batch_or_migration_id: int, links: Iterable[Link]) -> Iterator[None]:
        """Run a batch or migration. At its end, drop its messages, and report an error to its members."""
        try:
            yield
        except (PeerLostError, AbandonedError):  # the other members see the same
            raise
        except BaseException:
            self._abandon(Address(plane.abandoned, batch_or_migration_id, self.rank), links)
            raise
        finally:
            self._mailbox.close(plane, batch_or_migration_id)

    def _abandon(self, address: Address, links: Iterable[Link]) -> None:
        """Report to the others that nothing more is sent, so that they do not wait for the deadline."""
        for link in links:
            with suppress(ClusterError):
                self._send(link, address, torch.empty(0, dtype=torch.uint8, device="cpu"))

    def _gather_shards(self, x: Tensor) -> list[Tensor]:
        ranks = self.world.ranks(self._instance_id)
        shards = {rank: x if rank == self.rank else torch.empty_like(x) for rank in ranks}
        others = {rank: shard for rank, shard in shards.items() if rank != self.rank}
        batch = self._current_batch()
        self._exchange_ranks(batch, dict.fromkeys(others, x), others, Channel.TENSOR_PARALLEL).wait()
        return list(shards.values())

    def _send(self, link: Link, address: Address, tensor: Tensor) -> Future[None] | None:
        payload = memory_of(tensor)
        sent = link.send(address, payload)
        self.traffic.count(address.channel, len(payload))
        return sent

    def _current_batch(self) -> _Batch:
        if self._open_batch is None:
            raise InvalidMessageError(
                "no batch is open: verbs other than segments need `with fabric.batch(...)`"
            )
        return self._open_batch

    def _current_migration(self) -> _Migration:
        if self._open_migration is None:
            raise InvalidMessageError("no migration is open: segments need `with fabric.migration(...)`")
        return self._open_migration

    def _link_in(self, batch: _Batch, rank: int) -> Link:
        link = batch.links.get(rank) or batch.holders.get(rank)
        if link is None:
            instance_id = self.world.instance_id(rank)
            raise InvalidMessageError(
                f"instance {instance_id} is not in the group {batch.group} of the batch, nor serves it"
            )
        return link

    def _counterpart(self, instance_id: int) -> int:
        return self.world.rank(instance_id, self.world.tp_rank(self.rank))


@dataclass(frozen=True, slots=True)
class _Served:
    """The exchanges of a batch that this process serves: an Exchanging."""

    fabric: SocketFabric
    batch: _Batch

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Exchanging."""
        return self.fabric._exchange_in(self.batch, outgoing, incoming, channel)


def _raise_lost(error: PeerLostError | None) -> None:
    if error is not None:
        raise error
