"""Counters of what this process sent, so that "costs no extra message" is a test and not a claim."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, unique
from threading import Lock
from typing import NamedTuple


@unique
class Plane(IntEnum):
    """Migrations have connections of their own: a long segment must not delay a batch's small messages."""

    BATCH = 0
    MIGRATION = 1

    @property
    def abandoned(self) -> "Channel":
        """Where a process says that it left a batch or migration by an error of its own."""
        return Channel.BATCH_ABANDONED if self is Plane.BATCH else Channel.MIGRATION_ABANDONED


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

    @property
    def plane(self) -> Plane:
        """What its messages belong to: a batch or a migration."""
        is_of_migration = self in (Channel.SEGMENT, Channel.MIGRATION_ABANDONED)
        return Plane.MIGRATION if is_of_migration else Plane.BATCH


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
