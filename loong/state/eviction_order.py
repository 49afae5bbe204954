"""The order in which KV that nobody reads is evicted: what was used least recently goes first."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from loong.core.placement import InstanceId, OwnerId
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

    def on(self, instance_id: InstanceId) -> Iterator[tuple[KVOwner, int]]:
        """Yield owners and the stops of their uses."""
        for (_, stop), owner in self._uses[instance_id].items():
            yield owner, stop

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

    def forget_on(self, instance_id: InstanceId, uses: Iterable[tuple[KVOwner, int]]) -> None:
        """Forget uses on an instance that has no KV of them any more."""
        for owner, stop in uses:
            del self._uses[instance_id][owner.owner_id, stop]

    def lose(self, instance_id: InstanceId) -> None:
        """Forget an instance."""
        self._uses.pop(instance_id, None)

    def _put(self, owner: KVOwner, stop: int) -> None:
        for instance_id in owner.placement.instance_ids:
            self._uses[instance_id].setdefault((owner.owner_id, stop), owner)

    def _forget(self, owner: KVOwner, stop: int) -> None:
        for uses in self._uses.values():
            uses.pop((owner.owner_id, stop), None)
