"""Groups of requests that read the same keys and values, which a step reads once for all of them.

They follow from the owners of what each request borrows (RelayAttention, section 3.3 and appendix D, for a
tree of prefixes).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Final, TypeAlias

from loong.core.placement import InstanceId, KVSegment, OwnerId
from loong.core.plan import BatchPlan, Transfer
from loong.core.positions import common, subtract
from loong.core.request import RequestId

MAX_GROUPS: Final = 64  # of a step on an instance
MAX_LEVELS: Final = 4  # groups that a reader is in
_MAX_EXTENTS: Final = 16  # of an owner: ways to read a part of it
LEAST_ALONE: Final = 256  # queries of a request in a step: its attention is bound by computing
RELAY_QUERIES: Final = 100  # of groups that double the fixed part of a pass (H200, MHA; 180 with GQA of 4)

_Readers: TypeAlias = tuple[int, ...]
_Piece: TypeAlias = tuple[tuple[range, ...], _Readers]


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Readers `readers` of a `SharedReads`, at least two, and positions that all of them read in the same
    slots.

    A reader is in at most one group of each `level`.
    """

    level: int
    readers: range
    positions: tuple[range, ...]

    @property
    def num_keys(self) -> int:
        """Return the number of its positions."""
        return sum(map(len, self.positions))


@dataclass(frozen=True, slots=True)
class SharedReads:
    """The readers of all groups, in such an order that those of a group follow each other; and the groups."""

    order: tuple[int, ...] = ()
    groups: tuple[SharedGroup, ...] = ()

    @property
    def num_saved(self) -> int:
        """Return the keys that need not be read again, for all readers but one of each group."""
        return sum([group.num_keys * (len(group.readers) - 1) for group in self.groups])

    def is_worth(self, least_saved: int) -> bool:
        """Return whether one pass is faster, whose fixed part takes as long as reading `least_saved` keys."""
        return self.num_saved >= max(1, least_saved + least_saved * len(self.order) // RELAY_QUERIES)

    @property
    def num_levels(self) -> int:
        """Return one more than the highest level of a group."""
        return 1 + max([group.level for group in self.groups], default=-1)

    def positions_of(self) -> Mapping[int, tuple[range, ...]]:
        """Return the shared positions of each reader."""
        found: dict[int, tuple[range, ...]] = dict.fromkeys(self.order, ())
        for group in self.groups:
            for place in group.readers:
                found[self.order[place]] += group.positions
        return found


NOTHING_SHARED = SharedReads()


def shared_reads(shared: Sequence[Iterable[KVSegment]]) -> SharedReads:
    """Return what readers read together, given the shared parts of each that are in one pool.

    Groups are nested or disjoint, as the nodes of a tree. Of others, and beyond the limits of this module,
    those with fewer readers are left out.
    """
    found = _by_readers(shared)
    chains: dict[int, tuple[int, ...]] = {}
    accepted: list[tuple[_Readers, tuple[range, ...]]] = []
    for readers in sorted(found, key=lambda r: (-len(r), r)):
        around = {chains.get(reader, ()) for reader in readers}
        if len(around) > 1 or len(accepted) == MAX_GROUPS or len(chain := around.pop()) == MAX_LEVELS:
            continue
        chains.update(dict.fromkeys(readers, (*chain, len(accepted))))
        accepted.append((readers, found[readers]))
    if not accepted:
        return NOTHING_SHARED
    order = tuple(sorted(chains, key=lambda reader: (chains[reader], reader)))
    place = {reader: number for number, reader in enumerate(order)}
    groups = []
    for number, (readers, positions) in enumerate(accepted):
        first = min(map(place.__getitem__, readers))
        level = chains[readers[0]].index(number)
        groups.append(SharedGroup(level, range(first, first + len(readers)), positions))
    return SharedReads(order, tuple(groups))


def num_saved_keys(shared: Sequence[Sequence[KVSegment]], least_saved: int | None) -> int:
    """Return the keys that a step need not read again, given the shared parts of each request.

    Instances for which one pass is not worth it with `least_saved` read what they have for each request; all
    do if that is None.
    """
    sharing = [segments for segments in shared if segments]
    if least_saved is None or len(sharing) < 2:
        return 0
    instance_ids = {segment.instance_id for segments in sharing for segment in segments}
    reads = [shared_reads([on(segments, i) for segments in sharing]) for i in instance_ids]
    return sum([found.num_saved for found in reads if found.is_worth(least_saved)])


def reading_together(plan: BatchPlan) -> Iterator[list[RequestId]]:
    """Yield the requests whose KV travels, which do so once for all, and the others with few queries."""
    num_queries: Counter[RequestId] = Counter()
    for block in plan.queries:
        if block.transfer is Transfer.QUERY or plan.group.dop == 1:
            num_queries[block.request_id] += len(block.positions)
    yield [request_id for request_id in plan.request_ids if request_id not in num_queries]
    yield [request_id for request_id, number in num_queries.items() if number < LEAST_ALONE]


def on(segments: Iterable[KVSegment], instance_id: InstanceId) -> list[KVSegment]:
    """Return the segments that are on an instance."""
    return [segment for segment in segments if segment.instance_id == instance_id]


def _by_readers(shared: Sequence[Iterable[KVSegment]]) -> Mapping[_Readers, tuple[range, ...]]:
    """Return the positions of each set of at least two readers."""
    of_owner: dict[OwnerId, dict[tuple[range, ...], list[int]]] = {}
    for reader, segments in enumerate(shared):
        parts: dict[OwnerId, list[range]] = {}
        for owner_id, positions, _ in segments:
            parts.setdefault(owner_id, []).append(positions)
        for owner_id, ranges in parts.items():
            of_owner.setdefault(owner_id, {}).setdefault(tuple(ranges), []).append(reader)
    found: dict[_Readers, tuple[range, ...]] = {}
    for extents in of_owner.values():
        for shared_ranges, readers in _pieces(extents):
            if len(readers) > 1:
                found[readers] = (*found.get(readers, ()), *shared_ranges)
    return found


def _pieces(extents: Mapping[tuple[range, ...], Sequence[int]]) -> list[_Piece]:
    """Return the parts of an owner that the same readers read; of too many, what all read."""
    if len(extents) > _MAX_EXTENTS:
        all_readers = tuple(sorted(reader for some in extents.values() for reader in some))
        everywhere = reduce(lambda a, b: common(a, *b), extents)
        return [(everywhere, all_readers)] if everywhere else []
    pieces: list[_Piece] = []
    for ranges, readers in extents.items():
        left, cut = ranges, list[_Piece]()
        for held, its_readers in pieces:
            met = common(held, *left)
            if alone := subtract(held, *met):
                cut.append((alone, its_readers))
            if met:
                cut.append((met, tuple(sorted((*its_readers, *readers)))))
                left = subtract(left, *met)
        pieces = [*cut, (left, tuple(readers))] if left else cut
    return pieces
