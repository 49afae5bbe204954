"""Owners of KV that are no live requests: what several requests read in the same slots, or may read again."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from enum import Enum, auto
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loong.core.placement import InstanceId, KVSegment, OwnerId, Placement
from loong.core.positions import coalesce, common, subtract
from loong.core.request import RequestId, TokenId

MAX_GONE = 16  # records of an owner; the oldest are forgotten


class GoneCause(Enum):
    """The reason why KV that nobody read is gone."""

    EVICTED = auto()  # others needed its room
    RESET = auto()
    LOST = auto()  # with its instance
    DRAINED = auto()  # its instance was to leave
    UNSOUND = auto()  # the request that computed it failed


class Gone(NamedTuple):
    """Positions whose KV on an instance is gone since a time, in the clock of events."""

    positions: range
    instance_id: InstanceId
    cause: GoneCause
    time: float


class KVOwner:
    """Keys and values of some positions of a sequence of tokens, and the positions that each user reads.

    It is a node of a tree: `token_ids` are those from position `start` on, `parent` has those before. A child
    is known by its first position and its first token, with which no other continues there. `followers` are
    the live requests that have its first token. What nobody reads is `unread`: it may be evicted, and goes at
    once unless the owner `is_kept`. `has_changed` is set when its KV changes, or what its users share.
    `gone` are records of KV that it had, the latest last. Nothing but reasons follows from them.
    """

    def __init__(
        self, owner_id: OwnerId, start: int, token_ids: NDArray[np.int32], *, is_kept: bool = True
    ) -> None:
        self.owner_id, self.start, self.token_ids, self.is_kept = owner_id, start, token_ids, is_kept
        self.parent: KVOwner | None = None
        self.children: dict[tuple[int, TokenId], KVOwner] = {}
        self.followers: set[RequestId] = set()
        self.placement = Placement()
        self.users: dict[RequestId, tuple[range, ...]] = {}
        self.unread = Placement()
        self.gone: tuple[Gone, ...] = ()
        self.uses: list[int] = []  # the stops up to which it was used, the latest use first
        self.has_changed = False
        self._authors: list[tuple[int, RequestId]] = []  # from a position on, ascending
        self._authored_until = start
        self._num_users: Counter[range] = Counter()  # of positions
        self._shared: dict[RequestId, Placement] = {}  # of users that have asked since the last change

    @property
    def stop(self) -> int:
        """Return the position after its last token."""
        return self.start + len(self.token_ids)

    def follow(self, request_id: RequestId) -> None:
        """Note a live request that has its first token, and maybe new ones at its end."""
        self.followers.add(request_id)
        if not self._authors or self.stop > self._authored_until:
            self._authors.append((self._authored_until, request_id))
            self._authored_until = self.stop

    def author_at(self, position: int) -> RequestId | None:
        """Return the request that was the first to have the token at a position; None if none is known."""
        index = bisect_right(self._authors, position, key=itemgetter(0))
        return self._authors[index - 1][1] if index else None

    @property
    def root(self) -> "KVOwner":
        """Return the owner before all tokens, which has none."""
        owner = self
        while owner.parent is not None:
            owner = owner.parent
        return owner

    @property
    def is_empty(self) -> bool:
        """Return whether it has nothing, and nothing names it."""
        return not (self.placement.segments or self.users or self.children or self.followers)

    def attach(self, child: "KVOwner") -> None:
        """Add an owner of tokens that continue those below its first position."""
        child.parent = self
        self.children[child.start, int(child.token_ids[0])] = child

    def detach(self) -> "KVOwner":
        """Leave the parent, which it has, and return it."""
        assert self.parent is not None, "roots are not detached"
        parent, self.parent = self.parent, None
        del parent.children[self.start, int(self.token_ids[0])]
        return parent

    def num_matching(self, token_ids: NDArray[np.int32], first: int) -> int:
        """Return the number of its tokens that are those of a sequence from position `first` on."""
        own = self.token_ids[first - self.start :]
        most = min(len(own), len(token_ids) - first)
        different = own[:most] != token_ids[first : first + most]
        return int(different.argmax()) if different.any() else most

    def add(self, segments: Iterable[KVSegment]) -> None:
        """Take KV, of positions that it does not have."""
        self._hold(self.placement.adding([s._replace(owner_id=self.owner_id) for s in segments]))

    def remove(self, segment: KVSegment) -> None:
        """Drop KV that nobody reads."""
        self._hold(self.placement.removing(segment))

    def lend(self, user_id: RequestId, positions: Iterable[range]) -> None:
        """Let a request read these positions, too, of which it has no other KV."""
        self._read(user_id, (*self.users.get(user_id, ()), *positions))

    def read_by(self, user_id: RequestId) -> Placement:
        """Return the KV that a user reads here, as KV of the user."""
        return self._placed(user_id, self.users[user_id])

    def shared_with(self, user_id: RequestId) -> Placement:
        """Return the same without what no other user reads."""
        if (known := self._shared.get(user_id)) is None:
            own = Counter(self.users[user_id])
            others = [positions for positions, count in self._num_users.items() if count > own[positions]]
            alone = subtract(own, *others)
            known = self._shared[user_id] = self._placed(user_id, subtract(own, *alone))
        return known

    def give_back(self, user_id: RequestId, segments: Iterable[KVSegment]) -> Counter[InstanceId]:
        """End a user's use of `segments`, as far as it reads them here; return the slots that it read."""
        ended: Counter[InstanceId] = Counter()
        left = self.users[user_id]
        for segment in segments:
            here = common((segment.positions,), *self.placement.on(segment.instance_id))
            read = common(left, *here)
            left = subtract(left, *read)
            ended[segment.instance_id] += sum(map(len, read))
        self._read(user_id, left)
        return ended

    def leave(self, user_id: RequestId) -> Placement:
        """Remove a user; return what it read."""
        read = self.read_by(user_id)
        self._read(user_id, ())
        del self.users[user_id]
        return read

    def lose(self, instance_id: InstanceId) -> None:
        """Drop the KV on an instance, which is missing for all users then."""
        lost = self.placement.on(instance_id)
        for user_id, read in tuple(self.users.items()):
            self._read(user_id, subtract(read, *lost))
        self._hold(self.placement.without(instance_id))

    def num_unread_tokens(self) -> Counter[InstanceId]:
        """Return the number of tokens on each instance that nobody reads."""
        return Counter(self.unread.tokens_by_instance())

    def record(self, new: Gone) -> None:
        """Note what is to go, together with the last record if it comes just before that."""
        if self.gone and (last := self.gone[-1])[1:3] == new[1:3]:
            together = coalesce((new.positions, last.positions))
            if len(together) == 1:
                self.gone = (*self.gone[:-1], new._replace(positions=together[0]))
                return
        self.gone = (*self.gone[-MAX_GONE + 1 :], new)

    def _hold(self, placement: Placement) -> None:
        self.placement, self.has_changed = placement, True
        self._shared.clear()
        self._find_unread()

    def _read(self, user_id: RequestId, positions: tuple[range, ...]) -> None:
        """Let a user read just these positions.

        Other users share the same as before if each range that changes has two more readers at least.
        """
        before, self.users[user_id] = self.users.get(user_id, ()), positions
        self._shared.pop(user_id, None)
        fewest = 2
        for part in set(positions).difference(before):
            fewest = min(fewest, self._num_users[part])
            self._num_users[part] += 1
        for part in set(before).difference(positions):
            self._num_users[part] -= 1
            fewest = min(fewest, self._num_users[part])
            if not self._num_users[part]:
                del self._num_users[part]
        if fewest < 2:
            self._shared.clear()
            self.has_changed = True
        if fewest < 1:
            self._find_unread()

    def _find_unread(self) -> None:
        segments = self.placement.segments
        partly = self._num_users.keys() - {segment.positions for segment in segments}
        rest = [segment for segment in segments if segment.positions not in self._num_users]
        if partly:
            rest = [s._replace(positions=left) for s in rest for left in subtract((s.positions,), *partly)]
        self.unread = Placement(tuple(rest))

    def _placed(self, owner_id: OwnerId, positions: Iterable[range]) -> Placement:
        ranges = set(positions)
        partly = ranges - {segment.positions for segment in self.placement.segments}
        found: list[KVSegment] = []
        for _, held, instance_id in self.placement.segments:
            parts = (held,) if held in ranges else common((held,), *partly)
            found += [KVSegment(owner_id, part, instance_id) for part in parts]
        return Placement(tuple(found))
