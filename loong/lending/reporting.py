"""Heartbeats: the entries that have changed and that the gManager has not confirmed yet."""

from collections.abc import Iterable
from itertools import islice
from typing import TypeAlias

from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.lending.messages import MAX_ENTRIES

Key: TypeAlias = tuple[RequestId, InstanceId]

MAX_UNCONFIRMED = 16  # heartbeats that are remembered until they are confirmed


class Reporting:
    """The entries that the gManager does not know as they are now, with the number of their last change."""

    def __init__(self) -> None:
        self._unseen: dict[Key, int] = {}
        self._sent: dict[int, dict[Key, int]] = {}
        self._num_changes = self._num_at_restart = 0

    @property
    def is_confirmed(self) -> bool:
        """Return whether the manager has confirmed all."""
        return not self._unseen

    @property
    def has_restarted(self) -> bool:
        """Return whether a new manager has confirmed all that there was when it began."""
        return all(change > self._num_at_restart for change in self._unseen.values())

    def change(self, keys: Iterable[Key]) -> None:
        """Note entries that have changed."""
        for key in keys:
            self._num_changes += 1
            self._unseen[key] = self._num_changes

    def restart(self, keys: Iterable[Key]) -> None:
        """Report all of these to a new manager, and nothing else."""
        self._unseen.clear()
        self._sent.clear()
        self.change(keys)
        self._num_at_restart = self._num_changes

    def send(self, number: int) -> tuple[Key, ...]:
        """Return the entries of the heartbeat with this number: the oldest changes first."""
        while len(self._sent) >= MAX_UNCONFIRMED:
            del self._sent[next(iter(self._sent))]
        self._sent[number] = dict(islice(self._unseen.items(), MAX_ENTRIES))
        return tuple(self._sent[number])

    def seen(self, number: int) -> None:
        """Forget the entries of a confirmed heartbeat that have not changed since."""
        for key, change in self._sent.pop(number, {}).items():
            if self._unseen.get(key) == change:
                del self._unseen[key]
        self._sent = {n: sent for n, sent in self._sent.items() if n > number}
