"""Promises of a destination: room for the blocks of a move, first come, first served, for a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.lending.messages import Envelope
from loong.lending.rblocks import BlockRoom, RBlockPool
from loong.lending.recent import Recent

MoveKey: TypeAlias = tuple[InstanceId | None, int, int]
"""The sender of a move, its epoch, and the number of the move there."""


def key_of(envelope: Envelope) -> MoveKey:
    """Return the key of the move that a message belongs to."""
    return envelope.sender, envelope.sender_epoch, envelope.number


@dataclass(frozen=True, slots=True)
class Promise:
    """Reserved room for a move to an instance, until a time in seconds."""

    request_id: RequestId
    destination_id: InstanceId
    rooms: tuple[BlockRoom, ...]
    expires_at: float


class Promises:
    """The reservations of an engine's instances.

    A move that has ended here, with its blocks stored or not, stays known for `memory_seconds`. A message of
    it that comes late gets the same answer. None may be later than that.
    """

    def __init__(
        self, pools: Mapping[InstanceId, RBlockPool], promise_seconds: float, memory_seconds: float
    ) -> None:
        self.open: dict[MoveKey, Promise] = {}
        self.num_granted = self.num_refused = self.num_expired = 0
        self._pools = pools
        self._promise_seconds = promise_seconds
        self._ended = Recent[MoveKey, bool](memory_seconds)

    def ask(
        self,
        key: MoveKey,
        request_id: RequestId,
        destination_id: InstanceId,
        num_blocks: int,
        now: float,
        *,
        may_use_host: bool,
    ) -> bool:
        """Reserve room for a move, unless there is too little. A repeated question gets the same room."""
        if key in self.open or key in self._ended:
            return key in self.open or bool(self._ended.get(key))
        rooms = self._pools[destination_id].reserve(num_blocks, may_use_host=may_use_host)
        if rooms is None:
            self.num_refused += 1
            return False
        self.num_granted += 1
        self.open[key] = Promise(request_id, destination_id, rooms, now + self._promise_seconds)
        return True

    def take(self, key: MoveKey, now: float) -> Promise | None:
        """Return the room for the blocks of a move, which is to end now. None if it is too late."""
        self.expire(now)
        return self.open.pop(key, None)

    def end(self, key: MoveKey, *, is_stored: bool, now: float) -> None:
        """Remember the answer to the blocks of a move."""
        self._ended.set(key, is_stored, now)

    def answer_of(self, key: MoveKey) -> bool | None:
        """Return the answer to a move that has ended; None if it has not."""
        return self._ended.get(key)

    def cancel(self, is_void: Callable[[MoveKey, Promise], bool], now: float) -> None:
        """Free the room of promises that nobody will use."""
        for key, promise in [item for item in self.open.items() if is_void(*item)]:
            del self.open[key]
            self._pools[promise.destination_id].cancel(promise.rooms)
            self.end(key, is_stored=False, now=now)

    def expire(self, now: float) -> None:
        """Free the room of promises that nobody has used in time."""
        num_open = len(self.open)
        self.cancel(lambda _, promise: promise.expires_at <= now, now)
        self.num_expired += num_open - len(self.open)
