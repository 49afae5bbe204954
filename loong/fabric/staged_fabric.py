"""Carries tensors of a GPU over a fabric for the host's tensors.

It is correct but slow: every message passes the host's memory at both ends, and a send waits for the device
to compute its tensor.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from loong.fabric.errors import NoServiceError
from loong.fabric.protocol import (
    Fabric,
    OpenBatch,
    OpenInLane,
    OpenMigration,
    Pending,
    TensorParallelVerbs,
)
from loong.fabric.traffic import Channel


@dataclass(frozen=True, slots=True)
class _Staged:
    """A copy into the host's memory and the messages that follow it: a Pending."""

    pending: Pending
    arriving: Sequence[tuple[Tensor, Tensor]]  # on the host, on the device

    def wait(self) -> None:
        """See Pending."""
        self.pending.wait()
        for staged, tensor in self.arriving:
            tensor.copy_(staged)


class StagedFabric:
    """Implements Fabric for tensors of any device, over a fabric for the host's tensors."""

    arena = None

    def __init__(self, fabric: Fabric) -> None:
        self.world, self.traffic = fabric.world, fabric.traffic
        self._fabric = fabric

    @property
    def tensor_parallel(self) -> TensorParallelVerbs:
        """See Fabric; only for tensors of the host."""
        return self._fabric.tensor_parallel

    def wait_for_peers(self) -> None:
        """See Fabric."""
        self._fabric.wait_for_peers()

    @contextmanager
    def batch(
        self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()
    ) -> Iterator[OpenBatch]:
        """See Fabric."""
        with self._fabric.batch(batch_id, group, holders) as batch:
            yield _StagedBatch(batch)

    def serve(
        self,
        batch_id: int,  # noqa: ARG002 - see Fabric
        group: tuple[int, ...],  # noqa: ARG002 - see Fabric
    ) -> OpenInLane:
        """See Fabric. It has no service."""
        raise NoServiceError

    @contextmanager
    def migration(self, migration_id: int, peer_id: int) -> Iterator[OpenMigration]:
        """See Fabric."""
        with self._fabric.migration(migration_id, peer_id) as migration:
            yield _StagedMigration(migration)

    def broadcast(self, payload: Tensor) -> Tensor:
        """See Fabric; the payload is of the host."""
        return self._fabric.broadcast(payload)

    def close(self) -> None:
        """See Fabric."""
        self._fabric.close()


@dataclass(frozen=True, slots=True)
class _StagedBatch:
    """An OpenBatch for tensors of any device, over one for the host's tensors."""

    batch: OpenBatch

    @property
    def instance_id(self) -> int:
        """See OpenBatch."""
        return self.batch.instance_id

    def member(self, instance_id: int) -> int:
        """See OpenBatch."""
        return self.batch.member(instance_id)

    def check(self) -> None:
        """See OpenBatch."""
        self.batch.check()

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Exchanging."""
        staged = {i: _room_for(tensor) for i, tensor in incoming.items()}
        pending = self.batch.exchange({i: tensor.cpu() for i, tensor in outgoing.items()}, staged, channel)
        return _Staged(pending, [(staged[i], tensor) for i, tensor in incoming.items()])

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See OpenBatch; the payload is of the host."""
        return self.batch.exchange_control(group, payload)


@dataclass(frozen=True, slots=True)
class _StagedMigration:
    """An OpenMigration for tensors of any device, over one for the host's tensors."""

    migration: OpenMigration

    def send(self, tensor: Tensor) -> Pending:
        """See OpenMigration."""
        return self.migration.send(tensor.cpu())

    def receive(self, tensor: Tensor) -> Pending:
        """See OpenMigration."""
        staged = _room_for(tensor)
        return _Staged(self.migration.receive(staged), [(staged, tensor)])


def _room_for(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")
