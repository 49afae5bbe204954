"""The data plane over NCCL: grouped sends and receives on communicators made once, between GPUs of a host.

It is simple and general, but slower for small messages, because the host launches each one. Two
communicators, for batches and for migrations, serve any subset of processes, which all call in the engine's
order. A message without a receiver blocks later ones. Only ending the communicator ends a wait, and then this
process cannot continue. So a failure is permanent here, unlike in the fabric of arenas.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from threading import Event, Lock, Thread
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.device_transfer import DeviceTransfer
from loong.fabric.errors import InvalidMessageError, NoServiceError
from loong.fabric.messages.sockets import SocketFabric
from loong.fabric.protocol import Exchanging, Pending
from loong.fabric.tensor_parallel import TensorParallelGroup
from loong.fabric.traffic import Channel, Plane
from loong.fabric.world import neighbours

_LOOK_SECONDS = 0.02
_FOREVER = timedelta(days=1)  # this class keeps the deadline itself, to raise errors


class CollectiveFabric:
    """Implements Fabric for tensors on `device`, by communicators of a torch.distributed backend.

    `sockets` carries control messages, and reports members that are lost or have left.
    """

    arena = None

    def __init__(self, sockets: SocketFabric, device: torch.device, backend: str = "nccl") -> None:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # it would end the process without an error
        self.traffic, self.world = sockets.traffic, sockets.world
        self._sockets, self._rank, self._device, self._backend = sockets, sockets.rank, device, backend
        self._groups: dict[Plane, dist.ProcessGroup] = {}
        self._peer_rank = self._rank
        self._in_flight: deque[dist.Work] = deque()
        self._lock = Lock()  # of `_in_flight`
        self._oldest_since = monotonic()
        self._broken: ClusterError | None = None
        self._is_closed, self._changed = False, Event()
        tp_rank, tp_size = self.world.tp_rank(self._rank), self.world.tp_size
        self.tensor_parallel = TensorParallelGroup(tp_rank, tp_size, self._gather_shards)

    def wait_for_peers(self) -> None:
        """See Fabric."""
        self._sockets.wait_for_peers()
        dist.init_process_group(
            self._backend,
            init_method=f"file://{self._sockets.directory.resolve()}/communicators",
            rank=self._rank,
            world_size=self.world.size,
            timeout=_FOREVER,
            device_id=self._device if self._device.type == "cuda" else None,
        )
        everybody = dist.group.WORLD
        assert everybody is not None
        self._groups = {Plane.BATCH: everybody, Plane.MIGRATION: dist.new_group(timeout=_FOREVER)}
        for group in self._groups.values():
            self._meet_all(group)
        self._sockets.watch(self._changed.set)
        Thread(target=self._keep_watch, name="fabric-watch", daemon=True).start()

    @contextmanager
    def batch(self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()) -> Iterator[None]:
        """See Fabric."""
        if holders:
            raise NoServiceError
        with self._sockets.batch(batch_id, group):
            self._changed.set()
            yield
            self.check()

    def serve(
        self,
        batch_id: int,  # noqa: ARG002 - see Fabric
        group: tuple[int, ...],  # noqa: ARG002 - see Fabric
    ) -> AbstractContextManager[Exchanging]:
        """See Fabric. It has no service."""
        raise NoServiceError

    serve_lease = serve

    def check(self) -> None:
        """See Fabric."""
        if self._broken is not None:
            raise self._broken

    def ring_step(self, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor) -> Pending:
        """See Fabric."""
        following, previous = neighbours(ring, self.world.instance_id(self._rank))
        return self.exchange({following: outgoing}, {previous: incoming}, Channel.RING)

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Fabric."""
        sent = {self._sockets.member(i): tensor for i, tensor in outgoing.items()}
        come = {self._sockets.member(i): tensor for i, tensor in incoming.items()}
        return self._transfer(sent, come, channel)

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See Fabric; the payload is of the host."""
        return self._sockets.exchange_control(group, payload)

    @contextmanager
    def migration(self, migration_id: int, peer_id: int) -> Iterator[None]:
        """See Fabric."""
        with self._sockets.migration(migration_id, peer_id):
            self._peer_rank = self.world.rank(peer_id, self.world.tp_rank(self._rank))
            yield
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self.check()

    def send_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        return self._transfer({self._peer_rank: tensor}, {}, Channel.SEGMENT)

    def receive_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        return self._transfer({}, {self._peer_rank: tensor}, Channel.SEGMENT)

    def close(self) -> None:
        """See Fabric."""
        self._is_closed = True
        self._changed.set()
        self._sockets.close()
        if self._broken is None and self._groups:
            dist.destroy_process_group()

    def _meet_all(self, group: dist.ProcessGroup) -> None:
        """Connect to every other process, which takes long the first time."""
        for distance in range(1, self.world.size):
            to, source = (self._rank + distance) % self.world.size, (self._rank - distance) % self.world.size
            one, other = torch.zeros(2, 1, device=self._device)
            ops = [dist.P2POp(dist.isend, one, to, group), dist.P2POp(dist.irecv, other, source, group)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()

    def _transfer(self, sent: Mapping[int, Tensor], come: Mapping[int, Tensor], channel: Channel) -> Pending:
        """Begin one group of sends and receives, by rank.

        A message to this rank itself is part of the same call.
        """
        self.check()
        group = self._groups[channel.plane]
        ops = []
        for distance in range(self.world.size):  # all ranks order their peers by distance
            to, source = (self._rank + distance) % self.world.size, (self._rank - distance) % self.world.size
            if to in sent and self._is_message(sent[to]) and to != self._rank:
                ops.append(dist.P2POp(dist.isend, sent[to], to, group))
                self.traffic.count(channel, sent[to].nbytes)
            if source in come and self._is_message(come[source]) and source != self._rank:
                ops.append(dist.P2POp(dist.irecv, come[source], source, group))
        if self._rank in come and self._is_message(come[self._rank]):
            come[self._rank].copy_(sent[self._rank])
        works = dist.batch_isend_irecv(ops) if ops else []
        with self._lock:
            if not self._in_flight:
                self._oldest_since = monotonic()
            self._in_flight.extend(works)
        return DeviceTransfer([work.wait for work in works], (*sent.values(), *come.values()), self.check)

    def _gather_shards(self, x: Tensor) -> list[Tensor]:
        ranks = self.world.ranks(self.world.instance_id(self._rank))
        shards = {rank: x if rank == self._rank else torch.empty_like(x) for rank in ranks}
        others = {rank: shard for rank, shard in shards.items() if rank != self._rank}
        self._transfer(dict.fromkeys(others, x), others, Channel.TENSOR_PARALLEL).wait()
        return list(shards.values())

    def _keep_watch(self) -> None:
        """End the communicators when a process that owes a message is lost, has left, or is too late."""
        while not self._is_closed:
            self._changed.wait(_LOOK_SECONDS)
            self._changed.clear()
            try:
                if self._is_something_owed():
                    for plane in Plane:
                        self._sockets.raise_if_broken(plane)
                    self._raise_if_late()
            except ClusterError as error:
                self._broken = error
                for group in self._groups.values():
                    group.abort()
                return

    def _is_something_owed(self) -> bool:
        with self._lock:
            while self._in_flight and self._in_flight[0].is_completed():
                self._in_flight.popleft()
                self._oldest_since = monotonic()
            return bool(self._in_flight)

    def _raise_if_late(self) -> None:
        if monotonic() - self._oldest_since > self._sockets.deadline:
            raise ClusterError(f"an unknown peer was silent for {self._sockets.deadline:g} s")

    def _is_message(self, tensor: Tensor) -> bool:
        if not tensor.is_contiguous():
            raise InvalidMessageError(
                f"a tensor {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous"
            )
        return tensor.numel() > 0
