"""The data plane as a table of links: memory between near processes, device links between others."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loong.fabric.device_links.device_links import DeviceLinks
from loong.fabric.errors import NoServiceError
from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.protocol import Exchanging, Fabric, Pending, TensorParallelVerbs
from loong.fabric.tensor_parallel import TensorParallelGroup
from loong.fabric.tensors import is_message
from loong.fabric.traffic import Channel, Plane
from loong.fabric.world import neighbours

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


class LinkedFabric:
    """Implements Fabric for tensors on `device`.

    Tensors to and from the peers of `links` travel by these, all others by `near`, which also opens batches
    and carries control messages over `sockets`.
    """

    def __init__(self, sockets: SocketFabric, near: Fabric, links: DeviceLinks, device: torch.device) -> None:
        self.traffic, self.world = sockets.traffic, sockets.world
        self._sockets, self._near, self._links, self._device = sockets, near, links, device
        self._rank, self._segment_peer = sockets.rank, sockets.rank
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
    def batch(self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()) -> Iterator[None]:
        """See Fabric. Holders are reached where there is no device link."""
        self._check_service(holders)
        ranks = [rank for i in group for rank in self.world.ranks(i)]
        with self._near.batch(batch_id, group, holders), self._links.open(Plane.BATCH, batch_id, ranks):
            yield

    def serve(self, batch_id: int, group: tuple[int, ...]) -> AbstractContextManager[Exchanging]:
        """See Fabric. Members are reached where there is no device link."""
        self._check_service(group)
        return self._near.serve(batch_id, group)

    def serve_lease(self, batch_id: int, group: tuple[int, ...]) -> AbstractContextManager[Exchanging]:
        """See Fabric, and `serve`."""
        self._check_service(group)
        return self._near.serve_lease(batch_id, group)

    def check(self) -> None:
        """See Fabric."""
        self._links.check(Plane.BATCH)
        self._near.check()

    def ring_step(self, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor) -> Pending:
        """See Fabric."""
        following, previous = neighbours(ring, self._own_id)
        return self.exchange({following: outgoing}, {previous: incoming}, Channel.RING)

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Fabric."""
        if channel is Channel.CONTROL:
            return self._near.exchange(outgoing, incoming, channel)
        sent, come = self._to_links(outgoing), self._to_links(incoming)
        parts: tuple[Pending, ...] = (self._links.transfer(sent, come, channel),) if sent or come else ()
        near_sent, near_come = self._to_near(outgoing), self._to_near(incoming)
        if near_sent or near_come:
            parts += (self._near.exchange(near_sent, near_come, channel),)
        return _Pendings(parts)

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See Fabric; the payload is of the host."""
        return self._near.exchange_control(group, payload)

    @contextmanager
    def migration(self, migration_id: int, peer_id: int) -> Iterator[None]:
        """See Fabric."""
        peer = self._counterpart(peer_id)
        with (
            self._near.migration(migration_id, peer_id),
            self._links.open(Plane.MIGRATION, migration_id, [peer]),
        ):
            self._segment_peer = peer
            try:
                yield
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()
            finally:
                self._segment_peer = self._rank

    def send_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        return self._move_segment({self._segment_peer: tensor}, {}) or self._near.send_segment(tensor)

    def receive_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        return self._move_segment({}, {self._segment_peer: tensor}) or self._near.receive_segment(tensor)

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

    def _to_links(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the messages that travel by device links, by peer."""
        peers = {self._sockets.member(i): tensor for i, tensor in tensors.items()}
        return self._messages({peer: t for peer, t in peers.items() if peer in self._links.peers})

    def _to_near(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {i: tensor for i, tensor in tensors.items() if not self._is_linked(i)}

    def _messages(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        return {peer: tensor for peer, tensor in tensors.items() if is_message(tensor, self._device)}

    def _move_segment(self, sent: Mapping[int, Tensor], come: Mapping[int, Tensor]) -> Pending | None:
        """Begin to move a segment. Returns None if it does not travel by a device link."""
        if self._segment_peer not in self._links.peers:
            return None
        return self._links.transfer(self._messages(sent), self._messages(come), Channel.SEGMENT)

    def _check_service(self, instance_ids: tuple[int, ...]) -> None:
        if any(map(self._is_linked, instance_ids)):
            raise NoServiceError

    def _gather_shards(self, x: Tensor) -> list[Tensor]:
        ranks = self.world.ranks(self._own_id)
        shards = {rank: x if rank == self._rank else torch.empty_like(x) for rank in ranks}
        others = {rank: shard for rank, shard in shards.items() if rank != self._rank}
        self._links.transfer(dict.fromkeys(others, x), others, Channel.TENSOR_PARALLEL).wait()
        return list(shards.values())
