"""The order in which KV that nobody reads is evicted: copies first, then what was used least recently."""

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from operator import itemgetter
from typing import TypeAlias

from loong.core.placement import InstanceId, KVSegment, OwnerId
from loong.core.positions import common, subtract
from loong.state.owners import KVOwner

_Use: TypeAlias = tuple[OwnerId, int]  # up to a position


class EvictionOrder:
    """The uses of owners on each instance, the least recent first.

    A use up to a position covers the tokens from the use that ends before it, or from the owner's first.
    """

    def __init__(self) -> None:
        self._uses: defaultdict[InstanceId, OrderedDict[_Use, KVOwner]] = defaultdict(OrderedDict)

    def __bool__(self) -> bool:
        return any(self._uses.values())

    def first(
        self, instance_id: InstanceId, num_tokens: int, *, copies_only: bool
    ) -> list[tuple[KVOwner, KVSegment]]:
        """Return KV of `num_tokens` tokens that nobody reads, or all there is. Each use goes from its end.

        With `copies_only` it is KV of which another instance has a copy.
        """
        found: list[tuple[KVOwner, KVSegment]] = []
        for owner, used in self._used(instance_id):
            if not num_tokens:
                break
            if copies_only and not owner.has_copies:
                continue
            unread = common(owner.unread.on(instance_id), used)
            if copies_only:
                unread = tuple(_copied(owner, instance_id, unread))
            for positions in sorted(unread, key=itemgetter(-1), reverse=True):
                num_kept = max(0, len(positions) - num_tokens)
                num_tokens -= len(positions) - num_kept
                found.append((owner, KVSegment(owner.owner_id, positions[num_kept:], instance_id)))
        return found

    def use(self, owner: KVOwner, stop: int) -> None:
        """Note that an owner is used now up to a position. Earlier uses up to there are forgotten."""
        while owner.uses and owner.uses[0] <= stop:
            self._forget(owner, owner.uses.pop(0))
        owner.uses.insert(0, stop)
        self._put(owner, stop)

    def add(self, owner: KVOwner) -> None:
        """Put all uses of an owner last on the instances that have KV of it now, unless they are there."""
        for stop in owner.uses:
            self._put(owner, stop)

    def forget(self, owner: KVOwner) -> None:
        """Forget all uses of an owner."""
        for stop in owner.uses:
            self._forget(owner, stop)
        owner.uses.clear()

    def lose(self, instance_id: InstanceId) -> None:
        """Forget an instance."""
        self._uses.pop(instance_id, None)

    def _used(self, instance_id: InstanceId) -> Iterator[tuple[KVOwner, range]]:
        """Yield owners with the positions of a use. Afterwards, forget uses whose KV is gone."""
        empty: list[_Use] = []
        try:
            for use, owner in self._uses[instance_id].items():
                index = bisect_left(owner.uses, use[1])
                used = range(owner.uses[index - 1] if index else owner.start, use[1])
                if not common(owner.placement.on(instance_id), used):
                    empty.append(use)
                yield owner, used
        finally:
            for use in empty:
                del self._uses[instance_id][use]

    def _put(self, owner: KVOwner, stop: int) -> None:
        for instance_id in owner.placement.instance_ids:
            self._uses[instance_id].setdefault((owner.owner_id, stop), owner)

    def _forget(self, owner: KVOwner, stop: int) -> None:
        for uses in self._uses.values():
            uses.pop((owner.owner_id, stop), None)


def _copied(owner: KVOwner, instance_id: InstanceId, ranges: tuple[range, ...]) -> Iterator[range]:
    for positions in ranges:
        there = owner.elsewhere(KVSegment(owner.owner_id, positions, instance_id))
        alone = subtract((positions,), *[copy.positions for copy in there])
        yield from subtract((positions,), *alone)
