"""Where the keys and values of an owner are."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from loong.core.errors import InvalidPlanError
from loong.core.positions import coalesce, intersection, stripe, subtract

InstanceId: TypeAlias = int
OwnerId: TypeAlias = str  # a request's id, or a shared prefix's


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Keys and values of some positions of one request or shared prefix, on one instance."""

    owner_id: OwnerId
    positions: range
    instance_id: InstanceId


@dataclass(frozen=True)
class Placement:
    """All segments of one owner: disjoint, and in as few ranges as they fit."""

    segments: tuple[KVSegment, ...] = ()

    @cached_property
    def num_tokens(self) -> int:
        """Tokens whose KV exists, over all instances."""
        return sum(len(segment.positions) for segment in self.segments)

    @cached_property
    def instance_ids(self) -> tuple[InstanceId, ...]:
        """The instances that hold any of it, ascending."""
        return tuple(sorted({segment.instance_id for segment in self.segments}))

    def tokens_by_instance(self) -> Counter[InstanceId]:
        """How many tokens each instance holds."""
        counts: Counter[InstanceId] = Counter()
        for segment in self.segments:
            counts[segment.instance_id] += len(segment.positions)
        return counts

    def on(self, instance_id: InstanceId) -> tuple[range, ...]:
        """The positions that one instance holds."""
        return tuple(s.positions for s in self.segments if s.instance_id == instance_id)

    def holds(self, segment: KVSegment) -> bool:
        """Whether all of `segment` is where it says."""
        found = sum(len(intersection(held, segment.positions)) for held in self.on(segment.instance_id))
        return found == len(segment.positions)

    def adding(self, segments: Iterable[KVSegment]) -> "Placement":
        """This placement and `segments`, which must be disjoint from it."""
        result = self
        for segment in segments:
            positions = coalesce((*result.on(segment.instance_id), segment.positions))
            result = result._with(segment.owner_id, segment.instance_id, positions)
        return result

    def removing(self, segment: KVSegment) -> "Placement":
        """This placement without `segment`, which must be where it says."""
        if not self.holds(segment):
            raise InvalidPlanError(f"{segment} is not in {self}")
        positions = coalesce(subtract(self.on(segment.instance_id), segment.positions))
        return self._with(segment.owner_id, segment.instance_id, positions)

    def without(self, instance_id: InstanceId) -> "Placement":
        """This placement but for all that one instance holds."""
        return Placement(tuple(s for s in self.segments if s.instance_id != instance_id))

    def moving(self, segment: KVSegment, destination_id: InstanceId) -> "Placement":
        """This placement after `segment` has gone to another instance."""
        moved = KVSegment(segment.owner_id, segment.positions, destination_id)
        return self.removing(segment).adding((moved,))

    def _with(self, owner_id: OwnerId, instance_id: InstanceId, positions: Iterable[range]) -> "Placement":
        others = (s for s in self.segments if s.instance_id != instance_id)
        return Placement((*others, *(KVSegment(owner_id, p, instance_id) for p in positions)))


def striped(owner_id: OwnerId, positions: range, instance_ids: tuple[InstanceId, ...]) -> Placement:
    """The placement in which token i of `positions` is on instance `i mod P` of the ring order given."""
    count = len(instance_ids)
    stripes = ((stripe(positions, i, count), instance_id) for i, instance_id in enumerate(instance_ids))
    return Placement(tuple(KVSegment(owner_id, p, i) for p, i in stripes if p))
