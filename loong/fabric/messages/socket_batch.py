"""The open batches and migrations of a process, whose verbs send and receive messages."""

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from loong.core.errors import ClusterError
from loong.fabric.errors import InvalidMessageError
from loong.fabric.messages.link import Link, bytes_of, memory_of
from loong.fabric.messages.mailbox import Address, MessageQueue
from loong.fabric.messages.message_transfer import MessageTransfer
from loong.fabric.protocol import Pending
from loong.fabric.tensors import is_message
from loong.fabric.traffic import Channel, Traffic
from loong.fabric.world import World

_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SocketEnd:
    """The end of one process: its place in the world, and the messages that it has received."""

    world: World
    rank: int
    mailbox: MessageQueue
    traffic: Traffic
    deadline: float

    def counterpart(self, instance_id: int) -> int:
        """Return the rank of the process of an instance that has the same tp rank."""
        return self.world.rank(instance_id, self.world.tp_rank(self.rank))

    def send(self, link: Link, address: Address, tensor: Tensor) -> Future[None] | None:
        """Send a message; see `Link.send`."""
        payload = memory_of(tensor)
        sent = link.send(address, payload)
        self.traffic.count(address.channel, len(payload))
        return sent

    def abandon(self, address: Address, links: Iterable[Link]) -> None:
        """Report to the others that nothing more is sent, so that they do not wait for the deadline."""
        for link in links:
            with suppress(ClusterError):
                self.send(link, address, torch.empty(0, dtype=torch.uint8, device="cpu"))


@dataclass(frozen=True, slots=True)
class SocketBatch:
    """An open batch: an OpenBatch, or an Exchanging if it `is_served`."""

    end: SocketEnd
    batch_id: int
    group: tuple[int, ...]
    links: Mapping[int, Link]  # to its members by rank, without this process
    holders: Mapping[int, Link]  # by rank, those that serve it
    is_served: bool = False  # by this process, which is not a member

    @property
    def instance_id(self) -> int:
        """See OpenBatch."""
        return self.end.world.instance_id(self.end.rank)

    @property
    def peers(self) -> Collection[Link]:
        """The processes whose loss ends the batch here."""
        return (*self.links.values(), *self.holders.values())

    def raise_if_broken(self) -> None:
        """Raise the error of a wait if a process that takes part is lost or has left."""
        channel = Channel.SERVED_CONTROL if self.is_served else Channel.CONTROL
        self.end.mailbox.check(Address(channel, self.batch_id, self.end.rank), self.peers)

    def check(self) -> None:
        """See OpenBatch. A failed wait raises at once here, so there is nothing left to check."""

    def member(self, instance_id: int) -> int:
        """See OpenBatch."""
        rank = self.end.counterpart(instance_id)
        return rank if rank == self.end.rank else self._link(rank).rank

    def exchange(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """See Exchanging."""
        return self.exchange_ranks(
            {self.end.counterpart(i): tensor for i, tensor in outgoing.items()},
            {self.end.counterpart(i): tensor for i, tensor in incoming.items()},
            channel,
        )

    def exchange_control(self, group: tuple[int, ...], payload: Tensor) -> dict[int, Tensor]:
        """See OpenBatch."""
        world = self.end.world
        received = {instance_id: torch.empty_like(payload) for instance_id in group}
        is_speaker = world.tp_rank(self.end.rank) == 0
        listeners = [rank for i in group for rank in world.ranks(i)] if is_speaker else []
        speakers = {world.rank(i, 0): tensor for i, tensor in received.items()}
        self.exchange_ranks(dict.fromkeys(listeners, payload), speakers, Channel.CONTROL).wait()
        return received

    def exchange_ranks(
        self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], channel: Channel
    ) -> Pending:
        """Send and receive one tensor for each named rank, as `exchange` does for instances."""
        end = self.end
        own = Address(channel, self.batch_id, end.rank)
        arriving = channel.served if self.is_served and incoming else channel
        on_their_way = []
        for rank, tensor in outgoing.items():
            if not is_message(tensor, _HOST):
                continue
            if rank == end.rank:
                end.mailbox.deliver(own, bytes_of(tensor).clone())
                continue
            is_holder = rank in self.holders
            address = own._replace(channel=channel.served) if is_holder else own
            if sent := end.send(self._link(rank), address, tensor):
                on_their_way.append(sent)
        expected = tuple(
            (Address(arriving, self.batch_id, rank), tensor)
            for rank, tensor in incoming.items()
            if is_message(tensor, _HOST)
        )
        return MessageTransfer(end.mailbox, tuple(on_their_way), expected, self.peers, end.deadline)

    def _link(self, rank: int) -> Link:
        link = self.links.get(rank) or self.holders.get(rank)
        if link is None:
            instance_id = self.end.world.instance_id(rank)
            raise InvalidMessageError(
                f"instance {instance_id} is not in the group {self.group} of the batch, nor serves it"
            )
        return link


@dataclass(frozen=True, slots=True)
class SocketMigration:
    """An open migration, and the process at its other end: an OpenMigration."""

    end: SocketEnd
    migration_id: int
    link: Link

    @property
    def peers(self) -> Collection[Link]:
        """The process whose loss ends it."""
        return (self.link,)

    def raise_if_broken(self) -> None:
        """Raise the error of a wait if the other end is lost or has left."""
        self.end.mailbox.check(self._address(self.link.rank), self.peers)

    def send(self, tensor: Tensor) -> Pending:
        """See OpenMigration."""
        end, address = self.end, self._address(self.end.rank)
        end.mailbox.check(address, self.peers)
        sent = end.send(self.link, address, tensor) if is_message(tensor, _HOST) else None
        return MessageTransfer(end.mailbox, (sent,) if sent else (), (), (), end.deadline)

    def receive(self, tensor: Tensor) -> Pending:
        """See OpenMigration."""
        incoming = ((self._address(self.link.rank), tensor),) if is_message(tensor, _HOST) else ()
        return MessageTransfer(self.end.mailbox, (), incoming, self.peers, self.end.deadline)

    def _address(self, source: int) -> Address:
        return Address(Channel.SEGMENT, self.migration_id, source)
