"""The location of an owner's keys and values."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from loong.core.errors import InvalidPlanError
from loong.core.positions import coalesce, is_within, joining, stripe, subtract
from loong.core.value import computed_once

InstanceId: TypeAlias = int
OwnerId: TypeAlias = str  # a request's id, or that of KV that belongs to no live request


class KVSegment(NamedTuple):
    """Keys and values of some positions of one owner, on one instance."""

    owner_id: OwnerId
    positions: range
    instance_id: InstanceId


@dataclass(frozen=True)
class Placement:
    """All segments of one owner: in as few ranges as they fit, and they may leave holes.

    They are disjoint on each instance. Those of a request are disjoint; only an owner that is no request may
    have copies of a position on several instances.

    A request reads its `shared` parts in the slots of other owners, whose segments they are. Other requests
    read them there too, and a step reads them once for all (RelayAttention).
    """

    segments: tuple[KVSegment, ...] = ()
    shared: tuple[KVSegment, ...] = ()

    @computed_once
    def num_tokens(self) -> int:
        """Return the tokens whose KV exists, over all instances."""
        return sum(len(segment.positions) for segment in self.segments)

    @computed_once
    def stop(self) -> int:
        """Return one more than the last position; 0 if there is none."""
        return max([segment.positions[-1] + 1 for segment in self.segments], default=0)

    @property
    def has_holes(self) -> bool:
        """Return whether it lacks a position before its last one."""
        return self.num_tokens < self.stop

    @computed_once
    def holes(self) -> tuple[range, ...]:
        """Return the positions that it lacks before its last one, in as few ranges as they fit."""
        if not self.has_holes:
            return ()
        return coalesce(subtract((range(self.stop),), *[segment.positions for segment in self.segments]))

    @property
    def first_missing(self) -> int:
        """Return the lowest position that it lacks."""
        return self.holes[0].start if self.has_holes else self.stop

    @computed_once
    def instance_ids(self) -> tuple[InstanceId, ...]:
        """Return the instances that hold any of it, ascending."""
        return tuple(sorted({segment.instance_id for segment in self.segments}))

    def tokens_by_instance(self) -> Mapping[InstanceId, int]:
        """Return the number of tokens that each instance holds; 0 where it holds none."""
        return self._tokens_by_instance

    @computed_once
    def _tokens_by_instance(self) -> Counter[InstanceId]:
        return tokens_by_instance(self.segments)

    def on(self, instance_id: InstanceId) -> tuple[range, ...]:
        """Return the positions that one instance holds."""
        return tuple([s.positions for s in self.segments if s.instance_id == instance_id])

    def holds(self, segment: KVSegment) -> bool:
        """Return whether all of `segment` is where it says."""
        return is_within(segment.positions, self.on(segment.instance_id))

    def sharing(self, shared: tuple[KVSegment, ...]) -> "Placement":
        """Return this placement with other `shared` parts."""
        if shared == self.shared:
            return self
        placement = Placement(self.segments, shared)
        vars(placement).update({name: known for name, known in vars(self).items() if name != "shared"})
        return placement

    def of(self, owner_id: OwnerId) -> "Placement":
        """Return the same segments with another owner, who shares none."""
        return Placement(tuple(KVSegment(owner_id, s.positions, s.instance_id) for s in self.segments))

    def adding(self, segments: Iterable[KVSegment]) -> "Placement":
        """Return this placement and `segments`, which must be disjoint from it on the same instances."""
        result, new = self, tuple(segments)
        new_ids = {instance_id for _, _, instance_id in new}
        if len(new_ids) == len(new) and (not self.segments or new_ids.isdisjoint(self.instance_ids)):
            return Placement((*self.segments, *[s for s in new if s.positions]), self.shared)
        for segment in new:
            result = result._growing(segment) or result._coalescing(segment)
        return result

    def removing(self, segment: KVSegment) -> "Placement":
        """Return this placement without `segment`, which must be where it says."""
        if not self.holds(segment):
            raise InvalidPlanError(f"{segment} is not in {self}")
        positions = coalesce(subtract(self.on(segment.instance_id), segment.positions))
        return self._with(segment.owner_id, segment.instance_id, positions).sharing(self._shared_but(segment))

    def without(self, instance_id: InstanceId) -> "Placement":
        """Return this placement without the segments on one instance."""
        return Placement(
            tuple(s for s in self.segments if s.instance_id != instance_id),
            tuple(s for s in self.shared if s.instance_id != instance_id),
        )

    def moving(self, segment: KVSegment, destination_id: InstanceId) -> "Placement":
        """Return this placement after `segment` has gone to another instance."""
        moved = KVSegment(segment.owner_id, segment.positions, destination_id)
        return self.removing(segment).adding((moved,))

    def _growing(self, segment: KVSegment) -> "Placement | None":
        """Return it with `segment` at the end of the newest run, as decode tokens come.

        None if it is not next.
        """
        if not self.segments or not segment.positions:
            return None
        newest, new = self.segments[-1], segment.positions
        run = newest.positions
        if newest.instance_id == segment.instance_id and run.stop == new.start and run.step == new.step == 1:
            grown = KVSegment(segment.owner_id, range(run.start, new.stop), segment.instance_id)
            placement = Placement((*self.segments[:-1], grown), self.shared)
            known = vars(placement)  # the known values of its properties that are computed once
            known["num_tokens"], known["instance_ids"] = self.num_tokens + len(new), self.instance_ids
            known["stop"] = max(self.stop, new.stop)
            return placement
        return None

    def _coalescing(self, segment: KVSegment) -> "Placement":
        held, new = self.on(segment.instance_id), segment.positions
        if held and new and held[-1].start < new.start:  # as all that is computed
            positions = joining(held, new)
        else:
            positions = coalesce((*held, new))
        return self._with(segment.owner_id, segment.instance_id, positions)

    def _with(self, owner_id: OwnerId, instance_id: InstanceId, positions: Iterable[range]) -> "Placement":
        others = [s for s in self.segments if s.instance_id != instance_id]
        return Placement((*others, *[KVSegment(owner_id, p, instance_id) for p in positions]), self.shared)

    def _shared_but(self, segment: KVSegment) -> tuple[KVSegment, ...]:
        """Return the shared parts without those of a segment of the owner."""
        return tuple(
            shared._replace(positions=rest)
            for shared in self.shared
            for rest in (
                subtract((shared.positions,), segment.positions)
                if shared.instance_id == segment.instance_id
                else (shared.positions,)
            )
        )


class BorrowedKV(NamedTuple):
    """KV of another owner that a request reads in the same slots as other requests do."""

    owner_id: OwnerId
    placement: Placement


def shared_of(borrowed: Iterable[BorrowedKV]) -> tuple[KVSegment, ...]:
    """Return borrowed KV as segments of its owners."""
    return tuple(
        [segment._replace(owner_id=part.owner_id) for part in borrowed for segment in part.placement.segments]
    )


class CachedKV(NamedTuple):
    """KV of another owner that a request may borrow as it begins; `is_read` if something reads it now.

    Several parts have the same positions if there are copies: the request reads one of them.
    """

    segment: KVSegment
    is_read: bool


class OwnerView(NamedTuple):
    """KV of an owner that is no request, as policies see it.

    In these placements a position may be on several instances. What no request and no migration reads is
    `unread`. What is `retired` goes once its users read another copy.
    """

    owner_id: OwnerId
    placement: Placement
    unread: Placement
    retired: Placement


def tokens_by_instance(segments: Iterable[KVSegment]) -> Counter[InstanceId]:
    """Return the number of tokens of `segments` on each instance."""
    counts: Counter[InstanceId] = Counter()
    for _, positions, instance_id in segments:  # `get`, since what a counter lacks it finds by a call
        counts[instance_id] = counts.get(instance_id, 0) + len(positions)
    return counts


def striped(owner_id: OwnerId, positions: range, instance_ids: tuple[InstanceId, ...]) -> Placement:
    """Return the placement with token i of `positions` on instance `i mod P` of the given ring order."""
    count = len(instance_ids)
    stripes = ((stripe(positions, i, count), instance_id) for i, instance_id in enumerate(instance_ids))
    return Placement(tuple(KVSegment(owner_id, p, i) for p, i in stripes if p))
