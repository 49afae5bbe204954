"""The verbs of the data plane: what moves between instances, whatever carries it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from loong.fabric.traffic import Channel, Traffic
from loong.fabric.world import World


class Pending(Protocol):
    """A transfer under way. Its tensors belong to it until `wait` returns."""

    def wait(self) -> None:
        """Return once the outgoing tensors may be reused and the incoming ones are filled.

        On a device that is so for whatever the caller asks it for next; see `Fabric.check`.

        Raises PeerLostError as soon as a process that takes part is gone, AbandonedError as soon as one has
        left by an error of its own, DeadlineError when a peer is silent for the fabric's deadline. Outgoing
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


class Exchanging(Protocol):
    """What moves tensors between the instances of one batch."""

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """Send and receive one tensor per instance id named, on one channel, between equal tp ranks."""


class ServingFabric(Protocol):
    """A fabric by which an instance can serve batches of groups in which it is no member."""

    def serve(self, batch_id: int, group: tuple[int, ...]) -> AbstractContextManager[Exchanging]:
        """Open a batch that this process serves, for the thread that enters what is returned.

        Several may be open, and a batch of this process too, in any order of ids. Messages that came before
        are kept. A lost member, or one that leaves by an error, ends every wait in it. An error here ends
        those of the members.
        """


class Fabric(Exchanging, Protocol):
    """One process's end of the data plane.

    All tensors are contiguous, and both ends know the size of each message; an empty tensor is no message.
    The segment verbs may be called inside `migration` only, all others inside `batch` only; one thread may
    be in a batch while another is in a migration. A verb raises what its `Pending` raises.

    Ids grow from batch to batch, and from migration to migration, on every process. Once one is left, by its
    end or by an error, whatever still comes for it, or for an earlier one, is dropped. Who leaves by an error
    of its own tells the others, whose waits end at once.
    """

    world: World
    traffic: Traffic

    @property
    def tensor_parallel(self) -> TensorParallelVerbs:
        """The collectives of this instance's processes."""

    def wait_for_peers(self) -> None:
        """Return once the whole world has joined and is known here. Raises ClusterError at the deadline."""

    def batch(
        self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()
    ) -> AbstractContextManager[None]:
        """Open the batch that the verbs belong to; `group` holds the ids of the instances that run it.

        `holders` are those outside that serve it: `exchange` reaches them too. Raises `InvalidMessageError`
        if there are any and the fabric has no service.
        """

    def check(self) -> None:
        """Raise what a wait of the open batch would have raised, had the host waited.

        Call it when the device is done and before anybody is told what it made; leaving a batch calls it.
        """

    def ring_step(self, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor) -> Pending:
        """Send to the next instance of the ring, receive from the previous; sizes may differ at each hop."""

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """Every process of `group` learns the payload [N] int64 that tp rank 0 of each instance gave."""

    def migration(self, migration_id: int, peer_id: int) -> AbstractContextManager[None]:
        """Open a migration with the same tp rank of instance `peer_id`, at its other end."""

    def send_segment(self, tensor: Tensor) -> Pending:
        """Send KV at rest to the peer; several in a row stay in order."""

    def receive_segment(self, tensor: Tensor) -> Pending:
        """Receive KV at rest from the peer."""

    def close(self) -> None:
        """Leave: drop every connection, end every thread. To the peers, this process is then lost."""
