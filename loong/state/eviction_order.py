"""The order in which KV that nobody reads is evicted: copies first, then what was used least recently."""

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from operator import itemgetter
from typing import TypeAlias

from loong.core.placement import InstanceId, KVSegment, OwnerId
from loong.core.positions import common, subtract
from loong.state.owners import KVOwner

MAX_NEW = 16  # uses at a time that may go to a host tier

_Use: TypeAlias = tuple[OwnerId, int]  # up to a position


class EvictionOrder:
    """The uses of owners on each instance, the least recent first.

    A use up to a position covers the tokens from the use that ends before it, or from the owner's first.
    """

    def __init__(self) -> None:
        self._uses: defaultdict[InstanceId, OrderedDict[_Use, KVOwner]] = defaultdict(OrderedDict)
        self._new: defaultdict[InstanceId, OrderedDict[_Use, KVOwner]] = defaultdict(OrderedDict)

    def __bool__(self) -> bool:
        return any(self._uses.values())

    def first(
        self, instance_id: InstanceId, num_tokens: int, copies_on: Callable[[InstanceId], bool] | None
    ) -> list[tuple[KVOwner, KVSegment]]:
        """Return KV of `num_tokens` tokens that nobody reads, or all there is. Each use goes from its end.

        With `copies_on` it is KV of which another such instance has a copy.
        """
        found: list[tuple[KVOwner, KVSegment]] = []
        for owner, used in self._used(instance_id):
            if not num_tokens:
                break
            if copies_on is not None and not owner.has_copies:
                continue
            unread = common(owner.unread.on(instance_id), used)
            if copies_on is not None:
                unread = tuple(_copied(owner, instance_id, unread, copies_on))
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
        self._new.pop(instance_id, None)

    def new(self, instance_id: InstanceId, tier_id: InstanceId) -> list[tuple[KVOwner, range]]:
        """Return some uses of which a host tier lacks KV of its instance, with their positions, oldest first.

        A use is new until the host tier has its KV, or the instance has none. One that something reads comes
        later again.
        """
        found: list[tuple[KVOwner, range]] = []
        uses = self._new[instance_id]
        for use, owner in tuple(islice(uses.items(), MAX_NEW)):
            used = _positions(owner, use)
            lacking = subtract(common(owner.placement.on(instance_id), used), *owner.coming_to(tier_id))
            if not lacking:
                del uses[use]
            elif common(owner.unread.on(instance_id), used):
                found.append((owner, used))
            else:
                uses.move_to_end(use)
        return found

    def renew(self, owner: KVOwner) -> None:
        """Put all uses of an owner after all others, in their order."""
        for stop in reversed(owner.uses):
            for uses in self._uses.values():
                if (owner.owner_id, stop) in uses:
                    uses.move_to_end((owner.owner_id, stop))

    def _used(self, instance_id: InstanceId) -> Iterator[tuple[KVOwner, range]]:
        """Yield owners with the positions of a use. Afterwards, forget uses whose KV is gone."""
        empty: list[_Use] = []
        try:
            for use, owner in self._uses[instance_id].items():
                used = _positions(owner, use)
                if not common(owner.placement.on(instance_id), used):
                    empty.append(use)
                yield owner, used
        finally:
            for use in empty:
                del self._uses[instance_id][use]

    def _put(self, owner: KVOwner, stop: int) -> None:
        for instance_id in owner.placement.instance_ids:
            self._uses[instance_id].setdefault((owner.owner_id, stop), owner)
            self._new[instance_id].setdefault((owner.owner_id, stop), owner)

    def _forget(self, owner: KVOwner, stop: int) -> None:
        for uses in (*self._uses.values(), *self._new.values()):
            uses.pop((owner.owner_id, stop), None)


def _positions(owner: KVOwner, use: _Use) -> range:
    """Return the positions of a use that are in no later one."""
    index = bisect_left(owner.uses, use[1])
    return range(owner.uses[index - 1] if index else owner.start, use[1])


def _copied(
    owner: KVOwner,
    instance_id: InstanceId,
    ranges: tuple[range, ...],
    copies_on: Callable[[InstanceId], bool],
) -> Iterator[range]:
    for positions in ranges:
        there = owner.elsewhere(KVSegment(owner.owner_id, positions, instance_id))
        alone = subtract((positions,), *[copy.positions for copy in there if copies_on(copy.instance_id)])
        yield from subtract((positions,), *alone)
