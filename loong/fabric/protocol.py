"""The verbs of the data plane, for any transport."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

from loong.fabric.errors import InvalidMessageError
from loong.fabric.lanes import Lane
from loong.fabric.traffic import Channel, Traffic
from loong.fabric.world import World, neighbours

if TYPE_CHECKING:  # it imports kernels, which CPUs do without
    from loong.fabric.memory.arena import Arena


class Pending(Protocol):
    """A transfer in flight. It owns its tensors until `wait` returns."""

    def wait(self) -> None:
        """Return once the outgoing tensors may be reused and the incoming ones are filled.

        On a device this holds for later device work of the caller; see `Fabric.check`.

        Raises PeerLostError if a member's process is gone, and AbandonedError if a member has left by an
        error of its own. Raises DeadlineError when a peer is silent for the fabric's deadline. Outgoing
        tensors may then still be in use: drop them, and do not write to them.
        """


class TensorParallelVerbs(Protocol):
    """Collectives inside one instance. Every rank gets bitwise the same result."""

    @property
    def rank(self) -> int:
        """This process's rank in its instance."""

    @property
    def size(self) -> int:
        """The number of processes of the instance."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x in rank order, a new tensor.

        Floating x is accumulated in float32.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x [..., N] in rank order, [..., size * N], a new tensor. All x have one shape."""


class Exchanging(Protocol):
    """Moves tensors between the instances of one batch. A verb raises the errors of its `Pending`."""

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """Send and receive one tensor for each named instance, on one channel, between equal tp ranks."""


class OpenBatch(Exchanging, Protocol):
    """A batch that a member has open. Its verbs are for the thread that opened it."""

    @property
    def instance_id(self) -> int:
        """The instance of this process."""

    def member(self, instance_id: int) -> int:
        """Return the rank of an instance's process that this process talks to, or its own.

        Raises `InvalidMessageError` if the instance is neither in the group nor a holder.
        """

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """Return the payload [N] int64 of tp rank 0 of each instance, on every process of `group`."""

    def check(self) -> None:
        """Raise the error that a wait of the batch would have raised on the host.

        Call it when the device is done, before its results are reported. Leaving the batch calls it.
        """


class OpenMigration(Protocol):
    """A migration that is open, with the same tp rank of another instance at its other end."""

    def send(self, tensor: Tensor) -> Pending:
        """Send KV of a segment to the peer. Several in a row stay in order."""

    def receive(self, tensor: Tensor) -> Pending:
        """Receive KV of a segment from the peer."""


OpenInLane: TypeAlias = Callable[[Lane], AbstractContextManager[Exchanging]]


class Fabric(Protocol):
    """One process's end of the data plane. It opens batches and migrations, whose verbs move tensors.

    All tensors are contiguous, and both ends know the size of each message. An empty tensor is not sent. One
    thread may be in a batch while another is in a migration.

    Ids grow from batch to batch, and from migration to migration, on every process. After the end of a batch
    or migration, with or without an error, late messages for it or an earlier one are dropped. A process that
    leaves by its own error reports it, and the others' waits end at once.
    """

    world: World
    traffic: Traffic

    @property
    def arena(self) -> "Arena | None":
        """The memory that devices of this host write into, so that captured steps of its groups exchange.

        None where only the host can move tensors.
        """

    @property
    def tensor_parallel(self) -> TensorParallelVerbs:
        """The collectives of this instance's processes, for any time at which one batch is open.

        A model has them for life, so they find the batch by themselves.
        """

    def wait_for_peers(self) -> None:
        """Return once the whole world has joined and is connected. Raises ClusterError at the deadline."""

    def batch(
        self, batch_id: int, group: tuple[int, ...], holders: tuple[int, ...] = ()
    ) -> AbstractContextManager[OpenBatch]:
        """Open a batch of the instances in `group`, this one among them.

        `holders` are instances outside the group that serve it. `exchange` reaches them as well. Raises
        `InvalidMessageError` if there are any and the fabric has no service.
        """

    def serve(self, batch_id: int, group: tuple[int, ...]) -> OpenInLane:
        """Keep messages of a batch of another group that this process serves; return how it is opened.

        The result is called once, with a lane of the service, for the thread that enters the context. It goes
        on during batches of this process. Ids come in any order. Where `arena` is not None, one batch may be
        open in each lane, of groups without a common member. In the lanes of leases only control messages are
        exchanged. A member that is lost, or leaves by an error, ends every wait inside. An error here
        ends the waits of the members. Raises `InvalidMessageError` if the fabric has no service.
        """

    def migration(self, migration_id: int, peer_id: int) -> AbstractContextManager[OpenMigration]:
        """Open a migration with the same tp rank of instance `peer_id` at its other end."""

    def broadcast(self, payload: Tensor) -> Tensor:
        """Return the payload [N] int64 of this instance's tp rank 0 on all its ranks, in its open batch."""

    def close(self) -> None:
        """Drop all connections and end all threads. The peers then see this process as lost."""


class NoPeers:
    """The verbs of a step of one instance of one process, which is in no batch. See OpenBatch."""

    def __init__(self, instance_id: int) -> None:
        self.instance_id = instance_id

    def member(self, instance_id: int) -> int:
        """See OpenBatch."""
        raise InvalidMessageError(f"instance {instance_id} is no peer of a step that has none")

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Exchanging."""
        peers = sorted({*outgoing, *incoming})
        raise InvalidMessageError(f"{channel.name.lower()} with {peers} in a step without peers")

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See OpenBatch."""
        return dict.fromkeys(group, payload)

    def check(self) -> None:
        """See OpenBatch. Nobody can fail."""


def ring_step(batch: OpenBatch, ring: tuple[int, ...], outgoing: Tensor, incoming: Tensor) -> Pending:
    """Send to the next instance of a ring, and receive from the previous one.

    Sizes may differ at each hop.
    """
    following, previous = neighbours(ring, batch.instance_id)
    return batch.exchange({following: outgoing}, {previous: incoming}, Channel.RING)
