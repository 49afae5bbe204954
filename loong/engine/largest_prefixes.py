"""The owners of the prefix cache that have most KV, for those who look at it."""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest

from loong.core.placement import InstanceId, OwnerId
from loong.state.prefix_tree import PrefixTree

NUM_SHOWN = 10
MIN_AGE = 5.0  # seconds; all owners are looked at, which takes up to some 20 ms


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """KV of some tokens that follow each other, from position `start` on, and how many requests read it."""

    owner_id: OwnerId
    start: int
    tokens_by_instance: Mapping[InstanceId, int]
    num_readers: int

    @property
    def num_tokens(self) -> int:
        """Return the tokens whose KV is there."""
        return sum(self.tokens_by_instance.values())


class LargestPrefixes:
    """The largest owners of a tree, found anew when they are asked for after `MIN_AGE`."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree, self._found_at = tree, -MIN_AGE
        self._found: tuple[CachedPrefix, ...] = ()

    def at(self, now: float) -> tuple[CachedPrefix, ...]:
        """Return them, the largest first, as they are or were not long before."""
        if now - self._found_at >= MIN_AGE:
            self._found_at = now
            owners = nlargest(NUM_SHOWN, self._tree.by_id.values(), key=lambda o: o.placement.num_tokens)
            self._found = tuple(
                [
                    CachedPrefix(o.owner_id, o.start, dict(o.placement.tokens_by_instance()), len(o.users))
                    for o in owners
                    if o.placement.segments
                ]
            )
        return self._found
