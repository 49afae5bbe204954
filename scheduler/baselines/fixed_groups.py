"""Groups that never change, and the assignment of waiting requests to them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from loong.core.placement import InstanceId
from loong.core.positions import subtract
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch
from loong.scheduler.common.borrowed_kv import Place, SharedOnce
from loong.scheduler.common.future_kv import FutureKV
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.common.request_lengths import Lengths

Partition: TypeAlias = Callable[[Sequence[InstanceId]], list[tuple[InstanceId, ...]]]


def one_group(instance_ids: Sequence[InstanceId]) -> list[tuple[InstanceId, ...]]:
    """Return all instances in one group."""
    return [tuple(instance_ids)] if instance_ids else []


def one_per_instance(instance_ids: Sequence[InstanceId]) -> list[tuple[InstanceId, ...]]:
    """Return a group for every instance."""
    return [(instance_id,) for instance_id in instance_ids]


@dataclass(slots=True)
class FixedGroup:
    """Instances that run as one, and the requests on them. All sizes are tokens of KV.

    `decodes` and `prefills` are not in flight, and `batches` are. `joining` requests start now. They have
    `num_joining_tokens` to compute, and read `num_joining_read` that nobody reads. `held` are all that have
    begun, and `decoding` those of them that decode together, in flight or not. `num_promised` is the slots of
    all requests at their declared ends. `num_reserved` is the part of it for requests that are not in
    `decoding`. KV of requests that are leaving counts in both, and in `num_leaving`; what several read counts
    once in `together`. `pinned` is the KV that those who start now are the first to read, which took free
    slots.
    """

    instance_ids: tuple[InstanceId, ...]
    capacity: int
    free: dict[InstanceId, int]
    batches: list[RunningBatch] = field(default_factory=list)
    decodes: list[RequestView] = field(default_factory=list)
    prefills: list[RequestView] = field(default_factory=list)
    joining: list[RequestView] = field(default_factory=list)
    decoding: list[RequestView] = field(default_factory=list)
    held: list[RequestView] = field(default_factory=list)
    num_joining_tokens: int = 0
    num_joining_read: int = 0
    num_reserved: int = 0
    num_promised: int = 0
    num_leaving: int = 0
    together: SharedOnce = field(default_factory=SharedOnce)
    pinned: dict[Place, tuple[range, ...]] = field(default_factory=dict)

    @property
    def num_free(self) -> int:
        """Return the free slots of all its instances."""
        return sum(self.free.values())

    @property
    def too_long(self) -> list[RequestView]:
        """Return requests not in flight that never fit it, since it has lost instances."""
        return [view for view in self.decodes + self.prefills if view.num_final_tokens > self.capacity]

    def hold(self, view: RequestView, is_in_step: bool) -> None:
        """Count the final KV of a request here or on its way; `is_in_step` if it decodes with others."""
        self.held.append(view)
        self.num_promised += view.num_final_tokens
        self.together.add(view)
        if is_in_step:
            self.decoding.append(view)
        else:
            self.num_reserved += view.num_final_tokens

    def begin(self, view: RequestView, num_tokens: int) -> bool:
        """Take the slots of what a request that is not begun reads first, if it and a chunk have room.

        The chunk has `num_tokens`, whose slots the caller takes.
        """
        new = list[tuple[Place, tuple[range, ...]]]()
        for segment, is_read in view.cached if view.placement.segments else ():
            if not is_read:
                place = segment.owner_id, segment.instance_id
                new.append((place, subtract((segment.positions,), *self.pinned.get(place, ()))))
        if sum(len(positions) for _, ranges in new for positions in ranges) + num_tokens > self.num_free:
            return False
        for place, ranges in new:
            self.pinned[place] = (*self.pinned.get(place, ()), *ranges)
            self.free[place[1]] -= sum(map(len, ranges))
        return True

    def join(self, view: RequestView) -> None:
        """Add a request that begins here."""
        self.joining.append(view)
        if view.cached:
            self.num_joining_read += sum(view.num_unread_tokens().values())
        self.num_joining_tokens += view.num_uncomputed_tokens
        self.num_promised += view.num_final_tokens
        self.num_reserved += view.num_final_tokens
        self.together.add(view)

    def has_room_for(self, view: RequestView) -> bool:
        """Return whether the request fits without any later eviction.

        Requests in `decoding` advance one step at a time together, so they never use more than the peak of
        their future KV. The start of the others is open, so they count with all their final KV.
        """
        num_more = view.num_final_tokens
        if (
            view.borrowed
            and self.num_leaving + self.together.num_tokens + self.together.num_more(view) <= self.capacity
        ):
            return True
        return self.num_promised + num_more <= self.capacity or num_more <= self.num_unpromised

    @property
    def num_unpromised(self) -> int:
        """Return the slots that its requests never need; below 0 if they need more than there are."""
        peak = FutureKV.of(Lengths.of(self.decoding)).peak
        return self.capacity - min(self.num_promised, peak + self.num_reserved)


HasRoom: TypeAlias = Callable[[FixedGroup, RequestView], bool]
"""Returns whether a request may begin on a group."""

Load: TypeAlias = Callable[[FixedGroup], int]
"""The measure by which a new request chooses a group: the least."""


def promised(group: FixedGroup) -> int:
    """Return the slots that its requests will need at their ends."""
    return group.num_promised


def memory_in_use(group: FixedGroup) -> int:
    """Return the slots in use once the requests that join now are computed."""
    return group.capacity - group.num_free + group.num_joining_tokens + group.num_joining_read


def groups_of(found: PlanningView, parts: Iterable[tuple[InstanceId, ...]]) -> list[FixedGroup]:
    """Return a group for each of `parts`, with its requests and batches."""
    groups, group_of = [], {}
    for part in parts:
        capacity = sum(found.snapshot.instance[i].kv_capacity for i in part)
        num_leaving = sum(found.snapshot.leaving.get(i, 0) for i in part)
        free = {i: found.free[i] for i in part}
        group = FixedGroup(
            part, capacity, free, num_reserved=num_leaving, num_promised=num_leaving, num_leaving=num_leaving
        )
        groups.append(group)
        group_of.update(dict.fromkeys(part, group))
    for instance_set in found.instance_sets:
        group = group_of[instance_set.instance_ids[0]]
        group.decodes += instance_set.decodes
        group.prefills += instance_set.prefills
        for view in instance_set.decodes:
            group.hold(view, is_in_step=instance_set.is_ready)
        for view in instance_set.prefills:
            group.hold(view, is_in_step=False)
        for batch in instance_set.batches:
            for busy in {id(group_of[i]): group_of[i] for i in batch.plan.group.instance_ids}.values():
                busy.batches.append(batch)  # of more groups than one where requests have KV of several
            for view in map(found.snapshot.request.__getitem__, batch.plan.request_ids):
                if not view.has_ended:
                    has_prompt = view.num_computed_tokens >= view.num_prompt_tokens and not view.has_holes
                    group.hold(view, is_in_step=has_prompt and view.num_output_tokens > 0)
    return groups


def take(
    views: Iterable[RequestView],
    groups: Sequence[FixedGroup],
    max_tokens: float,
    load: Load = promised,
    has_room: HasRoom = FixedGroup.has_room_for,
) -> None:
    """Assign `views` to groups in their order: each to the group with least `load` that could ever hold it.

    If that group has no room yet, no later request joins it either, so that the request finds room at last. A
    group takes no more once its joining requests have `max_tokens` an instance to compute. That is its next
    step, and later requests may still go to other groups.
    """
    open_groups = list(groups)
    for view in views:
        num_tokens = view.num_final_tokens
        holders = frozenset(view.placement.instance_ids if view.cached else ())
        able = [g for g in open_groups if g.capacity >= num_tokens and holders.issubset(g.instance_ids)]
        if able:
            group = min(able, key=lambda g: (load(g), g.instance_ids))
            joins = has_room(group, view)
            if joins:
                group.join(view)
            if not joins or group.num_joining_tokens >= max_tokens * len(group.instance_ids):
                open_groups.remove(group)
        if not open_groups:
            return
