"""Counters of what this process sent, so that "costs no extra message" is a test and not a claim."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, unique
from threading import Lock
from typing import NamedTuple


@unique
class Plane(IntEnum):
    """Each has connections of its own, so that long messages of one do not delay those of another."""

    BATCH = 0
    MIGRATION = 1
    SERVICE = 2  # batches, where they come to a holder that is no member

    @property
    def abandoned(self) -> "Channel":
        """Where a process says that it left a batch or migration by an error of its own."""
        return _ABANDONED[self]


@unique
class Channel(IntEnum):
    """What a message is for. Messages of different channels are never mistaken for one another."""

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

    @property
    def plane(self) -> Plane:
        """What its messages belong to: a batch, a migration, or a batch that is served."""
        return _PLANES.get(self, Plane.BATCH)

    @property
    def served(self) -> "Channel":
        """Where a member's messages on this channel come to a holder that is no member."""
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
_PLANES = {
    Channel.SEGMENT: Plane.MIGRATION,
    Channel.MIGRATION_ABANDONED: Plane.MIGRATION,
    **dict.fromkeys((*_SERVED.values(), Channel.SERVICE_ABANDONED), Plane.SERVICE),
}


class Sent(NamedTuple):
    """What went out on one channel."""

    messages: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TrafficSnapshot:
    """What this process had sent at one moment; `after - before` is what it sent in between."""

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
        """The counts so far."""
        with self._lock:
            return TrafficSnapshot(dict(self._sent))
