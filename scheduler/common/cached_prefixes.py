"""KV of other owners that waiting requests read instead of computing it, where a policy can use it.

A policy plans from a snapshot in which requests that wait have such KV already (`reading`). Its plan says
what those read that begin (`with_borrowings`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from loong.core.instance import InstanceKind, Service
from loong.core.placement import BorrowedKV, CachedKV, InstanceId, KVSegment, OwnerId, Placement
from loong.core.plan import BatchPlan, Borrowing, IterationPlan
from loong.core.positions import first_overlap, num_below, subtract
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.core.window_memory import ending_before
from loong.scheduler.common.cluster_parts import Parts, place_of
from loong.scheduler.common.service import serves_all
from loong.scheduler.tuning import MAX_PIECES


def reading(snapshot: Snapshot, parts: Parts) -> Snapshot:
    """Return the snapshot with cached KV as KV of requests that wait: of the part that has most of it.

    Each part has the memory instances that it reaches, too.
    """
    if not any(view.cached for view in snapshot.waiting):
        return snapshot
    place: dict[InstanceId, tuple[int, ...]] = {
        i: (p,) for i, p in place_of(parts).items() if snapshot.instance[i].kind is InstanceKind.FULL
    }
    for i in snapshot.memory_free:
        place[i] = tuple(p for p, part in enumerate(parts) if _reaches(snapshot, part, i))
    return replace(snapshot, waiting=tuple([_reading(view, place, snapshot) for view in snapshot.waiting]))


def _reaches(snapshot: Snapshot, part: Sequence[InstanceId], memory_id: InstanceId) -> bool:
    """Return whether all of these instances are served by a memory instance."""
    if serves_all(snapshot):
        return True
    host_id, serves = snapshot.instance[memory_id].host_id, snapshot.instance[memory_id].serves
    return serves is not Service.NONE and all(snapshot.instance[i].host_id == host_id for i in part)


def computing(view: RequestView) -> RequestView:
    """Return a request as it is if it computes what it could read."""
    return replace(view, placement=Placement(), cached=(), borrowed=()) if view.cached else view


def with_borrowings(plan: IterationPlan, snapshot: Snapshot) -> IterationPlan:
    """Return the plan, made for a snapshot of `reading`, with what the requests read that begin.

    One begins later if batches on other instances, or moves there, leave no room for what it would read.
    """
    begun_ids = {request_id for batch in plan.batches for request_id in batch.request_ids}
    beginning = [view for view in snapshot.waiting if view.cached and view.request_id in begun_ids]
    if not beginning:
        return plan
    room = {**snapshot.free, **snapshot.memory_free}
    for batch in plan.batches:
        for instance_id, num_tokens in batch.num_reserved_tokens.items():
            room[instance_id] -= num_tokens
    for migration in plan.migrations:
        room[migration.destination_id] -= len(migration.segment.positions)
    borrowings, later_ids = list[Borrowing](), set[RequestId]()
    for view in beginning:
        unread = view.num_unread_tokens()
        if all(room[i] >= num_tokens for i, num_tokens in unread.items()):
            borrowings.append(Borrowing(view.request_id, tuple([part.segment for part in view.cached])))
            for i, num_tokens in unread.items():
                room[i] -= num_tokens
        else:
            later_ids.add(view.request_id)
    batches = plan.batches if not later_ids else tuple(_without(later_ids, plan.batches))
    return replace(plan, batches=batches, borrowings=tuple(borrowings))


def _without(request_ids: Collection[RequestId], batches: Iterable[BatchPlan]) -> Iterator[BatchPlan]:
    for batch in batches:
        kept = [request_id for request_id in batch.request_ids if request_id not in request_ids]
        if len(kept) == len(batch.request_ids):
            yield batch
        elif kept:
            yield batch.only_for(kept)


def _reading(
    view: RequestView, place: Mapping[InstanceId, tuple[int, ...]], snapshot: Snapshot
) -> RequestView:
    if not view.cached:
        return view
    at_place: dict[int, list[CachedKV]] = {}
    for part in view.cached:
        for index in place.get(part.segment.instance_id, ()):
            at_place.setdefault(index, []).append(part)
    if not at_place:
        return replace(view, cached=())
    chosen = {p: _one_copy(parts, snapshot) for p, parts in at_place.items()}
    tokens = {p: sum(len(part.segment.positions) for part in parts) for p, parts in chosen.items()}
    room, idle = Counter[int](), Counter[int]()
    for instance_id, indexes in place.items() if len(chosen) > 1 else ():
        room.update(dict.fromkeys(indexes, snapshot.instance[instance_id].kv_free))
        idle.update(dict.fromkeys(indexes, int(snapshot.instance[instance_id].is_idle)))
    return reading_parts(view, chosen[max(tokens, key=lambda p: (tokens[p], idle[p], room[p], -p))])


def _one_copy(parts: Sequence[CachedKV], snapshot: Snapshot) -> list[CachedKV]:
    """Return parts with each position once: the copy on an idle instance, or that with most room."""
    if first_overlap(part.segment.positions for part in parts) is None:
        return [*parts]

    def order(part: CachedKV) -> tuple[bool, int, int]:
        instance = snapshot.instance[part.segment.instance_id]
        return not instance.is_idle, -instance.kv_free, instance.instance_id

    found: list[CachedKV] = []
    for segment, is_read in sorted(parts, key=order):
        rest = subtract((segment.positions,), *[known.segment.positions for known in found])
        found += [CachedKV(segment._replace(positions=positions), is_read) for positions in rest]
    return found


def reading_parts(view: RequestView, parts: Sequence[CachedKV]) -> RequestView:
    """Return a request that reads these parts; in too many pieces, only those before the first gap."""
    found = _borrowing(view, parts)
    placement = found.placement
    if not (placement.has_holes and len(placement.segments) + len(placement.holes) > MAX_PIECES):
        return found
    first = placement.first_missing
    before = [
        CachedKV(segment._replace(positions=positions), is_read)
        for segment, is_read in parts
        if (positions := segment.positions[: num_below((segment.positions,), first)])
    ]
    return _borrowing(view, before)


def _borrowing(view: RequestView, parts: Sequence[CachedKV]) -> RequestView:
    if view.no_ends:
        parts = ending_before(parts, view.no_ends)
    of_owner: dict[OwnerId, list[KVSegment]] = {}
    for segment, _ in parts:
        of_owner.setdefault(segment.owner_id, []).append(segment)
    borrowed = [BorrowedKV(owner_id, Placement(tuple(segments))) for owner_id, segments in of_owner.items()]
    found = replace(view, cached=tuple(parts), borrowed=tuple(borrowed))
    return found.borrowing([part.segment for part in parts])
