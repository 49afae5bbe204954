"""Carries tensors of a GPU over a fabric for the host's tensors.

It is correct but slow: every message passes the host's memory at both ends, and a send waits for the device
to compute its tensor.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from loong.fabric.errors import NoServiceError
from loong.fabric.protocol import Exchanging, Fabric, Pending, TensorParallelVerbs
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

    def check(self) -> None:
        """See Fabric."""
        self._fabric.check()

    def batch(
        self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()
    ) -> AbstractContextManager[None]:
        """See Fabric."""
        return self._fabric.batch(batch_id, group, holders)

    def serve(
        self,
        batch_id: int,  # noqa: ARG002 - see Fabric
        group: tuple[int, ...],  # noqa: ARG002 - see Fabric
    ) -> AbstractContextManager[Exchanging]:
        """See Fabric. It has no service."""
        raise NoServiceError

    serve_lease = serve

    def ring_step(self, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor) -> Pending:
        """See Fabric."""
        staged = _room_for(incoming)
        return _Staged(self._fabric.ring_step(ring, outgoing.cpu(), staged), [(staged, incoming)])

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Fabric."""
        staged = {i: _room_for(tensor) for i, tensor in incoming.items()}
        pending = self._fabric.exchange({i: tensor.cpu() for i, tensor in outgoing.items()}, staged, channel)
        return _Staged(pending, [(staged[i], tensor) for i, tensor in incoming.items()])

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See Fabric; the payload is of the host."""
        return self._fabric.exchange_control(group, payload)

    def migration(self, migration_id: int, peer_id: int) -> AbstractContextManager[None]:
        """See Fabric."""
        return self._fabric.migration(migration_id, peer_id)

    def send_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        return self._fabric.send_segment(tensor.cpu())

    def receive_segment(self, tensor: Tensor) -> Pending:
        """See Fabric."""
        staged = _room_for(tensor)
        return _Staged(self._fabric.receive_segment(staged), [(staged, tensor)])

    def close(self) -> None:
        """See Fabric."""
        self._fabric.close()


def _room_for(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")
