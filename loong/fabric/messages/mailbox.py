"""The queue of received messages, which also drops late ones."""

from collections import deque
from collections.abc import Callable, Collection
from threading import Condition
from typing import NamedTuple, Protocol

from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.errors import AbandonedError, DeadlineError, PeerLostError
from loong.fabric.messages.fence import AnyOrderFence, Fence, GrowingFence
from loong.fabric.traffic import Channel, Plane
from loong.fabric.waiting import wait_for
from loong.fabric.world import World


class Address(NamedTuple):
    """The address of a message: its channel, its batch or migration, and the source rank."""

    channel: Channel
    batch_or_migration_id: int
    source: int

    @property
    def verb(self) -> str:
        """The address as a phrase for errors."""
        plane = self.channel.plane
        return f"{self.channel.name.lower()} of {plane.name.lower()} {self.batch_or_migration_id}"


class Peer(Protocol):
    """The state of a peer that a waiter depends on."""

    rank: int
    is_lost: bool


class MessageQueue:
    """All messages received and not yet taken, first in, first out at each address. Thread safe.

    Messages have their own memory and are copied out by the waiting thread. So a late or repeated message can
    never write into a tensor of the caller.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._changed = Condition()
        self._messages: dict[Address, deque[Tensor]] = {}
        self._fences: dict[Plane, Fence] = {
            Plane.BATCH: GrowingFence("batch"),
            Plane.MIGRATION: GrowingFence("migration"),
            Plane.SERVICE: AnyOrderFence("served batch"),
        }
        self._reports: list[Callable[[], None]] = []

    def watch(self, report: Callable[[], None]) -> None:
        """Call `report`, from any thread, whenever a peer may have been lost or have left."""
        self._reports.append(report)

    def deliver(self, address: Address, message: Tensor) -> None:
        """Add a message (uint8 [num_bytes]), unless its batch or migration has ended."""
        with self._changed:
            if not self._is_stale(address):
                self._messages.setdefault(address, deque()).append(message)
                self._changed.notify_all()
        if address.channel is address.channel.plane.abandoned:
            self._report()

    def take(self, address: Address, peers: Collection[Peer], seconds: float) -> Tensor:
        """Return the next message at `address`, waiting for it for at most `seconds`.

        Raises PeerLostError if any of `peers` is lost before the message arrives, and AbandonedError if any
        has left the batch or migration by an error. Otherwise raises DeadlineError.
        """

        def is_decided() -> bool:
            return address in self._messages or self._broken(address, peers) is not None

        with self._changed:
            wait_for(self._changed, is_decided, seconds)
            if address in self._messages:
                return self._pop(address)
            late = DeadlineError(address.verb, *self._world.place(address.source), seconds)
            raise self._broken(address, peers) or late

    def check(self, address: Address, peers: Collection[Peer]) -> None:
        """Raise the error of `take` if any of `peers` is lost or has left, without waiting."""
        with self._changed:
            if error := self._broken(address, peers):
                raise error

    def wake(self) -> None:
        """Make all waiters check their peers again."""
        with self._changed:
            self._changed.notify_all()
        self._report()

    def open(self, plane: Plane, batch_or_migration_id: int) -> None:
        """Keep messages of this batch or migration until it is closed, and drop stale ones.

        Raises `InvalidMessageError` if it was opened before, or after a later one but for what is served.
        """
        with self._changed:
            self._fences[plane].open(batch_or_migration_id)

    def close(self, plane: Plane, batch_or_migration_id: int) -> None:
        """Drop all messages of this batch or migration, now and later."""
        with self._changed:
            self._fences[plane].close(batch_or_migration_id)
            self._messages = {
                address: queue for address, queue in self._messages.items() if not self._is_stale(address)
            }

    def _report(self) -> None:
        for report in tuple(self._reports):
            report()

    def _broken(self, address: Address, peers: Collection[Peer]) -> ClusterError | None:
        """Return the reason why no message will arrive at `address`, or None."""
        for peer in peers:
            if peer.is_lost:
                return PeerLostError(address.verb, *self._world.place(peer.rank))
        abandoned = address.channel.plane.abandoned
        for peer in peers:
            if address._replace(channel=abandoned, source=peer.rank) in self._messages:
                return AbandonedError(address.verb, *self._world.place(peer.rank))
        return None

    def _pop(self, address: Address) -> Tensor:
        queue = self._messages[address]
        message = queue.popleft()
        if not queue:
            del self._messages[address]
        return message

    def _is_stale(self, address: Address) -> bool:
        if address.channel is Channel.START_LINK:
            return False  # it belongs to no batch
        return self._fences[address.channel.plane].is_stale(address.batch_or_migration_id)
