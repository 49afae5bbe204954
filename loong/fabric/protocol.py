"""The verbs of the data plane: what moves between instances, whatever carries it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from loong.fabric.traffic import Channel, Traffic


class Pending(Protocol):
    """A transfer under way. Its tensors belong to it until `wait` returns."""

    def wait(self) -> None:
        """Return once the outgoing tensors may be reused and the incoming ones are filled.

        Raises PeerLostError as soon as a process of the group is gone, BatchAbandonedError as soon as one has
        left the batch by an error, DeadlineError when a peer is silent for the fabric's deadline. Outgoing
        tensors may then still be on their way: let go of them, and write nothing into them.
        """


class TensorParallelVerbs(Protocol):
    """Collectives inside one instance. Every rank gets bitwise the same result."""

    @property
    def rank(self) -> int:
        """This process's place in its instance."""

    @property
    def size(self) -> int:
        """The number of processes of the instance."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in rank order, accumulated in float32 if x is floating. A new tensor."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x [..., N], in rank order: [..., size * N]. All have one shape. A new tensor."""


class Fabric(Protocol):
    """One process's end of the data plane.

    All tensors are contiguous, and both ends know the size of each message; an empty tensor is no message.
    Verbs may be called inside `batch` only, by one thread; the segment verbs need no batch and
    may run in other threads at the same time. A verb raises what its `Pending` raises.
    """

    traffic: Traffic

    @property
    def tensor_parallel(self) -> TensorParallelVerbs:
        """The collectives of this instance's processes."""

    def batch(self, batch_id: int, group: tuple[int, ...]) -> AbstractContextManager[None]:
        """Open the batch that the verbs belong to; `group` holds the ids of the instances that run it.

        Ids grow from batch to batch on every process. Once a batch is left, by its end or by an error,
        whatever still comes for it, or for an earlier one, is dropped.
        """

    def ring_step(self, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor) -> Pending:
        """Send to the next instance of the ring, receive from the previous; sizes may differ at each hop."""

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """Send and receive one tensor per instance id named, on one channel, between equal tp ranks."""

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """Every process of `group` learns the payload [N] int64 that tp rank 0 of each instance gave."""

    def send_segment(self, migration_id: int, destination: int, tensor: Tensor) -> Pending:
        """Send KV at rest to the same tp rank of instance `destination`; several in a row stay in order."""

    def receive_segment(self, migration_id: int, source: int, tensor: Tensor) -> Pending:
        """Receive what `source` sends with the same migration id."""

    def cancel_migration(self, migration_id: int) -> None:
        """Drop what came, and what may still come, for a migration that was rolled back."""

    def fence(self, instance_id: int) -> None:
        """Cut an instance off: waits on it fail at once and nothing it sends is read any more."""

    def close(self) -> None:
        """Leave: drop every connection, end every thread. To the peers, this process is then lost."""
