"""The data plane as a table of links: memory between near processes, device links between others."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loong.fabric.device_links.device_links import DeviceLinks
from loong.fabric.errors import NoServiceError
from loong.fabric.messages.socket_fabric import SocketFabric
from loong.fabric.protocol import (
    Fabric,
    OpenBatch,
    OpenInLane,
    OpenMigration,
    Pending,
    TensorParallelVerbs,
)
from loong.fabric.tensor_parallel import TensorParallelGroup
from loong.fabric.tensors import is_message
from loong.fabric.traffic import Channel, Plane

if TYPE_CHECKING:  # it imports kernels, which CPUs do without
    from loong.fabric.memory.arena import Arena


@dataclass(frozen=True, slots=True)
class _Pendings:
    """Several transfers: a Pending."""

    parts: tuple[Pending, ...]

    def wait(self) -> None:
        """See Pending."""
        for part in self.parts:
            part.wait()


@dataclass(frozen=True, slots=True)
class _LinkedBatch:
    """A batch whose members are reached by device links or, as in `near`, without: an OpenBatch."""

    near: OpenBatch
    links: DeviceLinks
    device: torch.device

    @property
    def instance_id(self) -> int:
        """See OpenBatch."""
        return self.near.instance_id

    def member(self, instance_id: int) -> int:
        """See OpenBatch."""
        return self.near.member(instance_id)

    def check(self) -> None:
        """See OpenBatch."""
        self.links.check(Plane.BATCH)
        self.near.check()

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Exchanging."""
        if channel is Channel.CONTROL:
            return self.near.exchange(outgoing, incoming, channel)
        (sent, near_sent), (come, near_come) = self._parted(outgoing), self._parted(incoming)
        parts: tuple[Pending, ...] = (self.links.transfer(sent, come, channel),) if sent or come else ()
        if near_sent or near_come:
            parts += (self.near.exchange(near_sent, near_come, channel),)
        return _Pendings(parts)

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See OpenBatch; the payload is of the host."""
        return self.near.exchange_control(group, payload)

    def _parted(self, tensors: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the messages that travel by device links, by peer, and the tensors of other instances."""
        linked: dict[int, Tensor] = {}
        near: dict[int, Tensor] = {}
        for instance_id, tensor in tensors.items():
            if (peer := self.member(instance_id)) not in self.links.peers:
                near[instance_id] = tensor
            elif is_message(tensor, self.device):
                linked[peer] = tensor
        return linked, near


@dataclass(frozen=True, slots=True)
class _LinkedMigration:
    """A migration whose ends have a device link: an OpenMigration."""

    peer: int
    links: DeviceLinks
    device: torch.device

    def send(self, tensor: Tensor) -> Pending:
        """See OpenMigration."""
        return self.links.transfer(self._messages(tensor), {}, Channel.SEGMENT)

    def receive(self, tensor: Tensor) -> Pending:
        """See OpenMigration."""
        return self.links.transfer({}, self._messages(tensor), Channel.SEGMENT)

    def _messages(self, tensor: Tensor) -> dict[int, Tensor]:
        return {self.peer: tensor} if is_message(tensor, self.device) else {}


class LinkedFabric:
    """Implements Fabric for tensors on `device`.

    Tensors to and from the peers of `links` travel by these, all others by `near`, which also opens batches
    and carries control messages over `sockets`.
    """

    def __init__(self, sockets: SocketFabric, near: Fabric, links: DeviceLinks, device: torch.device) -> None:
        self.traffic, self.world = sockets.traffic, sockets.world
        self._sockets, self._near, self._links, self._device = sockets, near, links, device
        self._rank = sockets.rank
        tp_rank, own_ranks = self.world.tp_rank(self._rank), self.world.ranks(self._own_id)
        self.tensor_parallel: TensorParallelVerbs = near.tensor_parallel
        if not links.peers.isdisjoint(own_ranks):
            self.tensor_parallel = TensorParallelGroup(tp_rank, self.world.tp_size, self._gather_shards)

    @property
    def arena(self) -> "Arena | None":
        """See Fabric. It is of the instances of this host."""
        return self._near.arena

    def wait_for_peers(self) -> None:
        """See Fabric."""
        self._near.wait_for_peers()
        self._links.meet()

    @contextmanager
    def batch(
        self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()
    ) -> Iterator[OpenBatch]:
        """See Fabric. Holders are reached where there is no device link."""
        self._check_service(holders)
        ranks = [rank for i in group for rank in self.world.ranks(i)]
        with (
            self._near.batch(batch_id, group, holders) as near,
            self._links.open(Plane.BATCH, batch_id, ranks),
        ):
            yield _LinkedBatch(near, self._links, self._device)

    def serve(self, batch_id: int, group: tuple[int, ...]) -> OpenInLane:
        """See Fabric. Members are reached where there is no device link."""
        self._check_service(group)
        return self._near.serve(batch_id, group)

    def broadcast(self, payload: Tensor) -> Tensor:
        """See Fabric; the payload is of the host."""
        return self._near.broadcast(payload)

    @contextmanager
    def migration(self, migration_id: int, peer_id: int) -> Iterator[OpenMigration]:
        """See Fabric."""
        peer = self._counterpart(peer_id)
        with (
            self._near.migration(migration_id, peer_id) as near,
            self._links.open(Plane.MIGRATION, migration_id, [peer]),
        ):
            is_linked = peer in self._links.peers
            yield _LinkedMigration(peer, self._links, self._device) if is_linked else near
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """See Fabric."""
        self._links.close()
        self._near.close()

    @property
    def _own_id(self) -> int:
        return self.world.instance_id(self._rank)

    def _counterpart(self, instance_id: int) -> int:
        return self.world.rank(instance_id, self.world.tp_rank(self._rank))

    def _is_linked(self, instance_id: int) -> bool:
        return self._counterpart(instance_id) in self._links.peers

    def _check_service(self, instance_ids: tuple[int, ...]) -> None:
        if any(map(self._is_linked, instance_ids)):
            raise NoServiceError

    def _gather_shards(self, x: Tensor) -> list[Tensor]:
        ranks = self.world.ranks(self._own_id)
        shards = {rank: x if rank == self._rank else torch.empty_like(x) for rank in ranks}
        others = {rank: shard for rank, shard in shards.items() if rank != self._rank}
        self._links.transfer(dict.fromkeys(others, x), others, Channel.TENSOR_PARALLEL).wait()
        return list(shards.values())
