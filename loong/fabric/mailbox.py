"""Where arriving messages wait for the caller, and where late ones end."""

from collections import deque
from collections.abc import Collection
from threading import Condition
from time import monotonic
from typing import NamedTuple, Protocol

from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.errors import BatchAbandonedError, DeadlineError, PeerLostError
from loong.fabric.traffic import Channel
from loong.fabric.world import World


class Address(NamedTuple):
    """What a message is: its purpose, its batch or migration, and the rank it comes from."""

    channel: Channel
    batch_or_migration_id: int
    source: int

    @property
    def verb(self) -> str:
        """The address in the words of an error message."""
        kind = "migration" if self.channel is Channel.SEGMENT else "batch"
        return f"{self.channel.name.lower()} of {kind} {self.batch_or_migration_id}"


class Peer(Protocol):
    """What a waiter must know of a process that it depends on."""

    rank: int
    is_lost: bool


class Mailbox:
    """All messages received and not yet taken, first in, first out at each address. Thread safe.

    Messages land in memory of their own and are copied out by whoever waits for them,
    so a late or repeated message can never write into a tensor of the caller.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._changed = Condition()
        self._messages: dict[Address, deque[Tensor]] = {}
        self._last_closed_batch = -1
        self._cancelled_migrations: set[int] = set()

    def deliver(self, address: Address, message: Tensor) -> None:
        """Add a message (uint8 [num_bytes]), unless nobody will ever want it."""
        with self._changed:
            if not self._is_stale(address):
                self._messages.setdefault(address, deque()).append(message)
                self._changed.notify_all()

    def take(self, address: Address, peers: Collection[Peer], deadline: float, seconds: float) -> Tensor:
        """The next message at `address`, waiting until `deadline` (monotonic; `seconds` from the start).

        Raises PeerLostError once any of `peers` is lost and the message has not come, BatchAbandonedError
        once any has left the batch by an error, else DeadlineError.
        """

        def is_decided() -> bool:
            return address in self._messages or self._broken(address, peers) is not None

        with self._changed:
            self._changed.wait_for(is_decided, max(0.0, deadline - monotonic()))
            if address in self._messages:
                return self._pop(address)
            late = DeadlineError(address.verb, *self._world.place(address.source), seconds)
            raise self._broken(address, peers) or late

    def wake(self) -> None:
        """Let every waiter look again: a peer was lost."""
        with self._changed:
            self._changed.notify_all()

    @property
    def last_closed_batch(self) -> int:
        """The greatest id of a batch that is over, -1 before the first."""
        return self._last_closed_batch

    def close_batch(self, batch_id: int) -> None:
        """Drop every message of this batch and of those before it, now and later."""
        with self._changed:
            self._last_closed_batch = batch_id
            self._drop_stale()

    def cancel_migration(self, migration_id: int) -> None:
        """Drop every message of this migration, now and later."""
        with self._changed:
            self._cancelled_migrations.add(migration_id)
            self._drop_stale()

    def _broken(self, address: Address, peers: Collection[Peer]) -> ClusterError | None:
        """Why no more is to be waited for at `address`."""
        for peer in peers:
            if peer.is_lost:
                return PeerLostError(address.verb, *self._world.place(peer.rank))
        if address.channel is Channel.SEGMENT:
            return None
        for peer in peers:
            if address._replace(channel=Channel.ABANDONED, source=peer.rank) in self._messages:
                return BatchAbandonedError(address.verb, *self._world.place(peer.rank))
        return None

    def _pop(self, address: Address) -> Tensor:
        queue = self._messages[address]
        message = queue.popleft()
        if not queue:
            del self._messages[address]
        return message

    def _is_stale(self, address: Address) -> bool:
        if address.channel is Channel.SEGMENT:
            return address.batch_or_migration_id in self._cancelled_migrations
        return address.batch_or_migration_id <= self._last_closed_batch

    def _drop_stale(self) -> None:
        self._messages = {
            address: queue for address, queue in self._messages.items() if not self._is_stale(address)
        }
