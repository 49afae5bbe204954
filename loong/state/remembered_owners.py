"""Owners without KV that are remembered for a while, so that a request finds why it lacks KV."""

from collections import OrderedDict
from collections.abc import Iterator

from loong.core.placement import OwnerId
from loong.state.owners import KVOwner

MAX_OWNERS = 4096
MAX_TOKENS = 1 << 20  # of them together


class RememberedOwners:
    """Owners that have nothing but tokens, the longest remembered first; none if it never `remembers`."""

    def __init__(self, *, remembers: bool) -> None:
        self._max_owners = MAX_OWNERS if remembers else 0
        self._owners: OrderedDict[OwnerId, tuple[KVOwner, int]] = OrderedDict()  # with tokens
        self._num_tokens = 0

    def __contains__(self, owner_id: OwnerId) -> bool:
        return owner_id in self._owners

    def add(self, owner: KVOwner) -> None:
        """Remember an owner."""
        self._owners[owner.owner_id] = owner, len(owner.token_ids)
        self._num_tokens += len(owner.token_ids)

    def discard(self, owner_id: OwnerId) -> None:
        """Remove an owner that is in use again, if it is there."""
        _, num_tokens = self._owners.pop(owner_id, (None, 0))
        self._num_tokens -= num_tokens

    def forget_oldest(self) -> Iterator[KVOwner]:
        """Yield those to forget now, as there are too many."""
        while len(self._owners) > self._max_owners or self._num_tokens > MAX_TOKENS:
            _, (owner, num_tokens) = self._owners.popitem(last=False)
            self._num_tokens -= num_tokens
            yield owner
