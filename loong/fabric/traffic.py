"""Counters of sent messages, so that tests can prove "costs no extra message"."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, unique
from threading import Lock
from typing import NamedTuple


@unique
class Plane(IntEnum):
    """The kinds of connections. Each kind has its own, so that long messages of one do not delay another."""

    BATCH = 0
    MIGRATION = 1
    SERVICE = 2  # batches, at a holder outside the group

    @property
    def link(self) -> "Channel":
        """The channel on which the ends of a device link of this plane agree on it."""
        return Channel.MIGRATION_LINK if self is Plane.MIGRATION else Channel.BATCH_LINK

    @property
    def abandoned(self) -> "Channel":
        """The channel on which a process reports that it left a batch or migration by its own error."""
        return _ABANDONED[self]


@unique
class Channel(IntEnum):
    """The purpose of a message. Messages of different channels are kept apart."""

    RING = 1
    QUERIES = 2
    PARTIALS = 3
    CONTROL = 4
    TENSOR_PARALLEL = 5
    SEGMENT = 6
    BATCH_ABANDONED = 7
    MIGRATION_ABANDONED = 8
    SERVED_QUERIES = 9
    SERVED_CONTROL = 10
    SERVICE_ABANDONED = 11
    SERVED_KV = 12
    BATCH_LINK = 13  # agreement on a device link, before its first use in a batch
    MIGRATION_LINK = 14
    START_LINK = 15  # outside of batches
    SERVED_PARTIALS = 16

    @property
    def plane(self) -> Plane:
        """The plane of its messages where they arrive: a batch, a migration, or a served batch."""
        return _PLANES.get(self, Plane.BATCH)

    @property
    def source_plane(self) -> Plane:
        """The plane of its messages where they come from."""
        return _SOURCE_PLANES.get(self, self.plane)

    @property
    def served(self) -> "Channel":
        """The channel for this channel's messages from a member to a holder outside the group."""
        return _SERVED[self]


_ABANDONED = {
    Plane.BATCH: Channel.BATCH_ABANDONED,
    Plane.MIGRATION: Channel.MIGRATION_ABANDONED,
    Plane.SERVICE: Channel.SERVICE_ABANDONED,
}
_SERVED = {
    Channel.QUERIES: Channel.SERVED_QUERIES,
    Channel.CONTROL: Channel.SERVED_CONTROL,
    Channel.RING: Channel.SERVED_KV,
}
_SOURCE_PLANES = {
    Channel.SERVED_QUERIES: Plane.BATCH,
    Channel.SERVED_KV: Plane.BATCH,
    Channel.SERVED_PARTIALS: Plane.SERVICE,
}
_PLANES = {
    Channel.SEGMENT: Plane.MIGRATION,
    Channel.MIGRATION_LINK: Plane.MIGRATION,
    Channel.MIGRATION_ABANDONED: Plane.MIGRATION,
    **dict.fromkeys((*_SERVED.values(), Channel.SERVICE_ABANDONED), Plane.SERVICE),
}


class Sent(NamedTuple):
    """The messages and bytes sent on one channel."""

    messages: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TrafficSnapshot:
    """The counts at one moment. `after - before` are the counts of the time between."""

    by_channel: Mapping[Channel, Sent]

    def __getitem__(self, channel: Channel) -> Sent:
        return self.by_channel[channel]

    @property
    def total(self) -> Sent:
        """The sum over all channels."""
        counts = self.by_channel.values()
        return Sent(sum(sent.messages for sent in counts), sum(sent.num_bytes for sent in counts))

    def __sub__(self, earlier: "TrafficSnapshot") -> "TrafficSnapshot":
        return TrafficSnapshot(
            {
                channel: Sent(
                    sent.messages - earlier[channel].messages, sent.num_bytes - earlier[channel].num_bytes
                )
                for channel, sent in self.by_channel.items()
            }
        )


class Traffic:
    """Messages and bytes sent by this process since it started, by channel."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sent = dict.fromkeys(Channel, Sent())

    def count(self, channel: Channel, num_bytes: int) -> None:
        """Add one message."""
        with self._lock:
            sent = self._sent[channel]
            self._sent[channel] = Sent(sent.messages + 1, sent.num_bytes + num_bytes)

    def snapshot(self) -> TrafficSnapshot:
        """Return the counts so far."""
        with self._lock:
            return TrafficSnapshot(dict(self._sent))
