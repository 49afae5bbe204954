"""The data plane between CPU processes: Unix sockets within a host, TCP between hosts."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from loong.fabric.errors import AbandonedError, InvalidMessageError, PeerLostError
from loong.fabric.messages.link import Link, memory_of
from loong.fabric.messages.mailbox import Address, MessageQueue
from loong.fabric.messages.network import Network
from loong.fabric.messages.peer_registry import PeerRegistry
from loong.fabric.messages.socket_batch import SocketBatch, SocketEnd, SocketMigration
from loong.fabric.protocol import Exchanging, OpenBatch, OpenInLane, OpenMigration
from loong.fabric.tensor_parallel import TensorParallelGroup
from loong.fabric.traffic import Channel, Plane, Traffic
from loong.fabric.world import World


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
        self._end = SocketEnd(world, rank, self._mailbox, self.traffic, deadline)
        self._peer_registry = PeerRegistry(directory, world, rank, self._mailbox, deadline, network)
        self._open: dict[tuple[Plane, int], SocketBatch | SocketMigration] = {}
        self._own_batch: SocketBatch | None = None  # of the collectives
        self._own_migration: SocketMigration | None = None
        self.tensor_parallel = TensorParallelGroup(world.tp_rank(rank), world.tp_size, self._gather_shards)

    def wait_for_peers(self) -> None:
        """Return once the whole world has joined. DeadlineError names a missing process."""
        self._peer_registry.wait_for_all(range(self.world.size))

    def wait_for_instance(self) -> None:
        """Return once all ranks of this instance have joined. DeadlineError names a missing process."""
        self._peer_registry.wait_for_all(self.world.ranks(self._instance_id))

    @contextmanager
    def batch(
        self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()
    ) -> Iterator[OpenBatch]:
        """See Fabric."""
        if self._own_batch is not None:
            raise InvalidMessageError(f"batch {batch_id} opened inside batch {self._own_batch.batch_id}")
        if self._instance_id not in group:
            raise InvalidMessageError(f"instance {self._instance_id} opened a batch of {group}")
        ranks = [rank for i in group for rank in self.world.ranks(i) if rank != self.rank]
        links = {rank: self._peer_registry.link(rank, Plane.BATCH, f"batch {batch_id}") for rank in ranks}
        served, lost = self._service_links(batch_id, holders)
        batch = SocketBatch(self._end, batch_id, group, links, served)
        self._mailbox.open(Plane.BATCH, batch_id)
        with self._opened(Plane.BATCH, batch_id, links.values()), self._reporting_to_holders(batch):
            _raise_lost(lost)
            self._own_batch = self._open[Plane.BATCH, batch_id] = batch
            try:
                yield batch
            finally:
                self._own_batch = None
                del self._open[Plane.BATCH, batch_id]

    def serve(self, batch_id: int, group: tuple[int, ...]) -> OpenInLane:
        """See Fabric. Lanes are all alike."""
        links, lost = self._service_links(batch_id, group)
        batch = SocketBatch(self._end, batch_id, group, links, {}, is_served=True)
        self._mailbox.open(Plane.SERVICE, batch_id)
        return lambda _lane: self._serving(batch, lost)

    @contextmanager
    def _serving(self, batch: SocketBatch, lost: PeerLostError | None) -> Iterator[Exchanging]:
        self._open[Plane.SERVICE, batch.batch_id] = batch
        try:
            _raise_lost(lost)
            yield batch
        except BaseException:
            address = Address(Channel.BATCH_ABANDONED, batch.batch_id, self.rank)
            self._end.abandon(address, batch.links.values())
            raise
        finally:
            del self._open[Plane.SERVICE, batch.batch_id]
            self._mailbox.close(Plane.SERVICE, batch.batch_id)

    @contextmanager
    def _reporting_to_holders(self, batch: SocketBatch) -> Iterator[None]:
        """Report an early end of a batch to its holders, which do not know all of its members."""
        try:
            yield
        except BaseException:
            address = Address(Channel.SERVICE_ABANDONED, batch.batch_id, self.rank)
            self._end.abandon(address, batch.holders.values())
            raise

    def _service_links(
        self, batch_id: int, instance_ids: tuple[int, ...]
    ) -> tuple[Mapping[int, Link], PeerLostError | None]:
        """Return the links to those of these instances that are there, and the error of one that is not."""
        links: dict[int, Link] = {}
        lost: PeerLostError | None = None
        for rank in map(self._end.counterpart, instance_ids):
            try:
                links[rank] = self._peer_registry.link(rank, Plane.SERVICE, f"batch {batch_id}")
            except PeerLostError as error:
                lost = error
        return links, lost

    def broadcast(self, payload: Tensor) -> Tensor:
        """See Fabric."""
        return self._batch_of_collectives().exchange_control((self._instance_id,), payload)[self._instance_id]

    @contextmanager
    def migration(self, migration_id: int, peer_id: int) -> Iterator[OpenMigration]:
        """See Fabric."""
        if (before := self._own_migration) is not None:
            raise InvalidMessageError(
                f"migration {migration_id} opened inside migration {before.migration_id}"
            )
        link = self._peer_registry.link(
            self._end.counterpart(peer_id), Plane.MIGRATION, f"migration {migration_id}"
        )
        self._mailbox.open(Plane.MIGRATION, migration_id)
        with self._opened(Plane.MIGRATION, migration_id, [link]):
            migration = SocketMigration(self._end, migration_id, link)
            self._own_migration = self._open[Plane.MIGRATION, migration_id] = migration
            try:
                yield migration
            finally:
                self._own_migration = None
                del self._open[Plane.MIGRATION, migration_id]

    def close(self) -> None:
        """See Fabric."""
        self._peer_registry.close()

    def watch(self, report: Callable[[], None]) -> None:
        """Call `report`, from any thread, whenever `raise_if_broken` may have a new error."""
        self._mailbox.watch(report)

    def raise_if_broken(self, plane: Plane, its_id: int) -> None:
        """Raise the error of a wait in an open batch or migration, if a peer of it is lost or has left."""
        if (open_here := self._open.get((plane, its_id))) is not None:
            open_here.raise_if_broken()

    def post(self, channel: Channel, its_id: int, rank: int, payload: Tensor) -> None:
        """Send a message of the host that is not counted as traffic."""
        address = Address(channel, its_id, self.rank)
        self._peer_registry.link(rank, channel.plane, address.verb).send(address, memory_of(payload))

    def receive(self, channel: Channel, its_id: int, rank: int) -> Tensor:
        """Return the next message (uint8 [num_bytes]) that `rank` has posted.

        Raises the errors of a wait in that batch or migration, if it is open.
        """
        address, open_here = Address(channel, its_id, rank), self._open.get((channel.plane, its_id))
        peers: Collection[Link] = (self._peer_registry.link(rank, channel.plane, address.verb),)
        if channel is channel.plane.link and open_here is not None:
            peers = open_here.peers
        return self._mailbox.take(address, peers, self.deadline)

    @property
    def num_stray_frames(self) -> int:
        """The number of frames dropped while peers joined."""
        return self._peer_registry.strays.num_dropped

    def num_joins(self, rank: int) -> int:
        """Return how often a peer has joined."""
        return self._peer_registry.num_joins(rank)

    @contextmanager
    def _opened(self, plane: Plane, batch_or_migration_id: int, links: Iterable[Link]) -> Iterator[None]:
        """Run a batch or migration. At its end, drop its messages, and report an error to its members."""
        try:
            yield
        except (PeerLostError, AbandonedError):  # the other members see the same
            raise
        except BaseException:
            self._end.abandon(Address(plane.abandoned, batch_or_migration_id, self.rank), links)
            raise
        finally:
            self._mailbox.close(plane, batch_or_migration_id)

    def _gather_shards(self, x: Tensor) -> list[Tensor]:
        ranks = self.world.ranks(self._instance_id)
        shards = {rank: x if rank == self.rank else torch.empty_like(x) for rank in ranks}
        others = {rank: shard for rank, shard in shards.items() if rank != self.rank}
        batch = self._batch_of_collectives()
        batch.exchange_ranks(dict.fromkeys(others, x), others, Channel.TENSOR_PARALLEL).wait()
        return list(shards.values())

    def _batch_of_collectives(self) -> SocketBatch:
        if self._own_batch is None:
            raise InvalidMessageError("no batch is open: collectives need `with fabric.batch(...)`")
        return self._own_batch


def _raise_lost(error: PeerLostError | None) -> None:
    if error is not None:
        raise error
