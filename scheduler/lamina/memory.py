"""The room of memory instances, and the KV that goes there: of prompts as it is made, of decodes later."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from loong.core.placement import InstanceId
from loong.core.plan import KVMigration, QueryBlock, Transfer
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.moving_kv import is_movable, moved
from loong.scheduler.common.shares import Share, dealt_out, filled, leveled
from loong.scheduler.common.striping import RequestPart, next_positions
from loong.scheduler.lamina.homes import Home
from loong.scheduler.tuning import KEPT_KV_SHARE, MOVED_TAIL

Balance: TypeAlias = Callable[[int, Mapping[InstanceId, int]], Iterator[Share]]
"""Divides a number of tokens of one request among memory instances, by their room."""


def by_sequence(num_tokens: int, rooms: Mapping[InstanceId, int]) -> Iterator[Share]:
    """Give each memory instance an equal part of every sequence, so that all read equally much."""
    return leveled(num_tokens, rooms)


def by_request(num_tokens: int, rooms: Mapping[InstanceId, int]) -> Iterator[Share]:
    """Give a request to the memory instance with most room, and the rest to others if it has too little."""
    return filled(num_tokens, dict(sorted(rooms.items(), key=lambda room: (-room[1], room[0]))))


@dataclass(slots=True)
class MemoryRoom:
    """The free slots of memory instances, and the `balance` by which KV is divided among them."""

    free: dict[InstanceId, int]
    balance: Balance

    @classmethod
    def of(cls, snapshot: Snapshot, balance: Balance) -> "MemoryRoom":
        """Return the room at present."""
        return cls({i: max(0, num_free) for i, num_free in snapshot.memory_free.items()}, balance)

    @property
    def num_free(self) -> int:
        """Return all free slots."""
        return sum(self.free.values())

    def take_read(self, num_tokens: Mapping[InstanceId, int]) -> bool:
        """Take the slots of cached KV that is to be read, which are free, too; False if some are taken."""
        if any(num_read > self.free[i] for i, num_read in num_tokens.items()):
            return False
        for instance_id, num_read in num_tokens.items():
            self.free[instance_id] -= num_read
        return True

    def taken(self, num_tokens: int) -> list[Share]:
        """Take slots for tokens of a request, as many as there are, and return where."""
        shares = list(self.balance(num_tokens, self.free))
        for instance_id, num_taken in shares:
            self.free[instance_id] -= num_taken
        return shares


def prompt_part(view: RequestView, home: Home, memory: MemoryRoom) -> RequestPart | None:
    """Return as much of a prompt as has room, whose KV goes to memory instances layer by layer.

    The KV of all but a first chunk passes slots of its home. What has no room elsewhere stays there. None if
    there is no room at all, or none for what it reads of others and nobody has read before.
    """
    if not memory.take_read(view.num_unread_tokens()):
        return None
    transfer = Transfer.QUERY if view.placement.segments else Transfer.KV
    num_room = home.num_free if transfer is Transfer.QUERY else home.num_free + memory.num_free
    num_tokens = min(view.num_uncomputed_tokens, num_room)
    if not num_tokens:
        return None
    positions = next_positions(view, num_tokens)
    shares = memory.taken(num_tokens)
    num_kept = num_tokens - sum(num_taken for _, num_taken in shares)
    home.num_free -= num_tokens if transfer is Transfer.QUERY else num_kept
    if num_kept:
        shares.append((home.instance_id, num_kept))
    queries = tuple(QueryBlock(view.request_id, p, home.instance_id, transfer) for p in positions)
    return RequestPart(queries, tuple(dealt_out(view.request_id, positions, shares)))


def moves(home: Home, snapshot: Snapshot, memory: MemoryRoom) -> Iterator[KVMigration]:
    """Yield the moves of KV that decodes have made at home, the longest first, while too little is free.

    A lease reads it meanwhile. One round ends before the next begins.
    """
    views = (*home.computing, *home.decodes)
    if any(view.is_migrating for view in views):
        return
    num_lacking = round((1 - KEPT_KV_SHARE) * home.pool) - snapshot.free[home.instance_id]
    for view in sorted(views, key=home.num_held, reverse=True) if num_lacking > 0 else ():
        num_held = home.num_held(view)
        if num_lacking <= 0 or num_held < MOVED_TAIL or not memory.num_free:
            return
        if is_movable(view, snapshot.ending_ids) and home.has_own(view):
            num_lacking -= num_held
            yield from moved(view, home.instance_id, memory.taken(num_held))


def moved_at_rest(view: RequestView, home: Home, memory: MemoryRoom) -> tuple[KVMigration, ...]:
    """Return the moves of all KV that a request at rest has at home, as far as there is room."""
    return tuple(moved(view, home.instance_id, memory.taken(home.num_held(view))))
