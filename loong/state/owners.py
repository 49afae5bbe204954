"""Owners of KV that are no live requests: what several requests read in the same slots, or may read again."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from loong.core.placement import InstanceId, KVSegment, OwnerId, Placement
from loong.core.positions import common, subtract
from loong.core.request import RequestId, TokenId


class KVOwner:
    """Keys and values of some positions of a sequence of tokens, and the positions that each user reads.

    It is a node of a tree: `token_ids` are those from position `start` on, `parent` has those before. A child
    is known by its first position and its first token, with which no other continues there. `followers` are
    the live requests that have its first token. What nobody reads is `unread`: it may be evicted, and goes at
    once unless the owner `is_kept`. `has_changed` is set when its KV changes, or what its users share.
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
        self.uses: list[int] = []  # the stops up to which it was used, the latest use first
        self.has_changed = False
        self._num_users: Counter[range] = Counter()  # of positions
        self._shared: dict[RequestId, Placement] = {}  # of users that have asked since the last change

    @property
    def stop(self) -> int:
        """Return the position after its last token."""
        return self.start + len(self.token_ids)

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
