"""The order in which KV is evicted: copies that others keep longer, then what was used least recently."""

from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from itertools import islice, permutations
from operator import itemgetter
from typing import TypeAlias

from loong.core.placement import InstanceId, KVSegment, OwnerId
from loong.core.positions import common, subtract
from loong.state.owners import KVOwner

MAX_NEW = 16  # uses at a time that may go to a host tier

_Use: TypeAlias = tuple[OwnerId, int]  # up to a position
_Uses: TypeAlias = OrderedDict[_Use, KVOwner]
_Found: TypeAlias = list[tuple[KVOwner, KVSegment]]


class EvictionOrder:
    """The uses of owners on each instance, the least recent first.

    A use up to a position covers the tokens from the use that ends before it, or from the owner's first. Uses
    are numbered. The horizon of an instance is the latest use of which it has evicted KV in this order. A
    copy is evicted first if another copy is where the horizon is not later, as that one stays longer. So all
    instances come to evict what was used equally long ago, although some take more KV than others.
    A use is only on instances that have KV of its owner. `serves` says whether requests can read the KV of an
    instance.
    """

    def __init__(self, serves: Callable[[InstanceId], bool]) -> None:
        self._serves = serves
        self._num_uses = 0
        self._numbers: dict[_Use, int] = {}
        self._horizons: defaultdict[InstanceId, int] = defaultdict(int)
        self._uses: defaultdict[InstanceId, _Uses] = defaultdict(OrderedDict)
        self._new: defaultdict[InstanceId, _Uses] = defaultdict(OrderedDict)
        # By an instance, and another one that may have copies
        self._copied: defaultdict[InstanceId, defaultdict[InstanceId, _Uses]] = defaultdict(
            lambda: defaultdict(OrderedDict)
        )
        self._had_copies: set[OwnerId] = set()  # which alone are in there

    def __bool__(self) -> bool:
        return any(self._uses.values())

    def first(self, instance_id: InstanceId, num_tokens: int) -> _Found:
        """Return KV of `num_tokens` tokens that nobody reads, or all there is. Each use goes from its end."""
        found: _Found = []
        empty: list[_Use] = []
        for use, owner in self._uses[instance_id].items():
            if not num_tokens:
                break
            used = _positions(owner, use)
            going = _last(common(owner.unread.on(instance_id), used), num_tokens)
            if going:
                num_tokens -= sum(map(len, going))
                self._horizons[instance_id] = max(self._horizons[instance_id], self._numbers[use])
                found += [(owner, KVSegment(owner.owner_id, positions, instance_id)) for positions in going]
            elif not common(owner.placement.on(instance_id), used):
                empty.append(use)
        for use in empty:
            del self._uses[instance_id][use]
        return found

    def keepers(self, instance_id: InstanceId) -> list[InstanceId]:
        """Return the instances that keep KV as long as this one or longer, beginning with the longest."""
        horizons = self._horizons
        others = (i for i in self._copied[instance_id] if horizons[i] <= horizons[instance_id])
        return sorted(others, key=lambda i: (horizons[i], i))

    def copies(self, instance_id: InstanceId, keeper_id: InstanceId, num_tokens: int) -> _Found:
        """Return KV of `num_tokens` tokens that nobody reads and that a keeper has too, or all there is."""
        found: _Found = []
        empty: list[_Use] = []
        uses = self._copied[instance_id][keeper_id]
        for use, owner in uses.items():
            if not num_tokens:
                break
            here = common(owner.placement.on(instance_id), _positions(owner, use))
            copied = common(here, *owner.staying_on(keeper_id))
            if copied:
                going = _last(common(copied, *owner.unread.on(instance_id)), num_tokens)
                num_tokens -= sum(map(len, going))
                found += [(owner, KVSegment(owner.owner_id, positions, instance_id)) for positions in going]
            else:
                empty.append(use)
        for use in empty:
            del uses[use]
        return found

    def use(self, owner: KVOwner, stop: int) -> None:
        """Note that an owner is used now up to a position. Earlier uses up to there are forgotten."""
        while owner.uses and owner.uses[0] <= stop:
            self._forget(owner, owner.uses.pop(0))
        owner.uses.insert(0, stop)
        self._num_uses += 1
        self._numbers[owner.owner_id, stop] = self._num_uses
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
        self._had_copies.discard(owner.owner_id)

    def leave(self, owner: KVOwner, instance_id: InstanceId) -> None:
        """Forget the uses of an owner on an instance that has no KV of it any more."""
        for stop in owner.uses:
            use = owner.owner_id, stop
            self._uses[instance_id].pop(use, None)
            self._new[instance_id].pop(use, None)
            if owner.owner_id in self._had_copies:
                for other_id, others in self._copied.items():
                    for uses in others.values() if other_id == instance_id else (others[instance_id],):
                        uses.pop(use, None)

    def lose(self, instance_id: InstanceId) -> None:
        """Forget an instance."""
        for by_instance in (self._uses, self._new, self._copied, self._horizons):
            by_instance.pop(instance_id, None)
        for others in self._copied.values():
            others.pop(instance_id, None)

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
            for instance_id in owner.placement.instance_ids:
                if (use := (owner.owner_id, stop)) in self._uses[instance_id]:
                    self._uses[instance_id].move_to_end(use)

    def uses_on(self, instance_id: InstanceId) -> list[tuple[KVOwner, int]]:
        """Return owners with the position up to which each use goes, the least recent first."""
        return [(owner, stop) for (_, stop), owner in self._uses[instance_id].items()]

    def _put(self, owner: KVOwner, stop: int) -> None:
        use = owner.owner_id, stop
        for instance_id in owner.placement.instance_ids:
            self._uses[instance_id].setdefault(use, owner)
            self._new[instance_id].setdefault(use, owner)
        if owner.has_copies:
            self._had_copies.add(owner.owner_id)
            serving = filter(self._serves, owner.placement.instance_ids)
            for instance_id, other_id in permutations(serving, 2):
                self._copied[instance_id][other_id].setdefault(use, owner)

    def _forget(self, owner: KVOwner, stop: int) -> None:
        use, placed = (owner.owner_id, stop), owner.placement.instance_ids
        self._numbers.pop(use, None)
        for instance_id in placed:
            self._uses[instance_id].pop(use, None)
            self._new[instance_id].pop(use, None)
        if owner.owner_id in self._had_copies:
            for instance_id, other_id in permutations(placed, 2):
                self._copied[instance_id][other_id].pop(use, None)


def _positions(owner: KVOwner, use: _Use) -> range:
    """Return the positions of a use that are in no later one."""
    index = bisect_left(owner.uses, use[1])
    return range(owner.uses[index - 1] if index else owner.start, use[1])


def _last(ranges: tuple[range, ...], num_tokens: int) -> list[range]:
    """Return the last `num_tokens` positions of disjoint ranges, or all if there are fewer, from the end."""
    found = list[range]()
    for positions in sorted(ranges, key=itemgetter(-1), reverse=True):
        if going := positions[max(0, len(positions) - num_tokens) :]:
            num_tokens -= len(going)
            found.append(going)
    return found
