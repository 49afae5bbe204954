"""The rules of KV of owners that are no requests: what may be moved, copied and evicted."""

from collections import Counter
from collections.abc import Iterable

from loong.core.errors import InvalidPlanError
from loong.core.instance import MAX_MOVING_TOKENS
from loong.core.placement import InstanceId, KVSegment, OwnerId, OwnerView
from loong.core.plan import KVMigration
from loong.core.positions import common, is_within, subtract
from loong.core.rules.case import Case


def check_copies(case: Case) -> None:
    """Check that KV of owners is there, moves once, and arrives where it is not, within the pace.

    The tokens that go from one instance to another at a time, of all owners, are at most MAX_MOVING_TOKENS.
    """
    owners = case.snapshot.owners
    new = [m for m in case.plan.migrations if m.segment.owner_id in owners]
    before = case.snapshot.copies
    for migration in new:
        _check_source(owners[migration.segment.owner_id], migration)
    for index, migration in enumerate(new):
        others = [*before, *new[:index]]
        _check_destination(owners[migration.segment.owner_id], migration, others)
        _check_moved_once(migration, others)
    _check_pace(new, before)


def check_owner_evictions(case: Case) -> None:
    """Check that evicted KV of owners is there, and that nothing reads it, or goes on to."""
    evicted: list[KVSegment] = []
    for segment in (eviction.segment for eviction in case.plan.evictions):
        owner = case.snapshot.owners.get(segment.owner_id)
        if owner is None:
            continue
        if not is_within(segment.positions, owner.unread.on(segment.instance_id)):
            raise InvalidPlanError(f"{segment} is to be evicted, but is not there, or is read")
        borrowed = (s for b in case.plan.effective_borrowings for s in b.segments)
        moved = (migration.segment for migration in case.plan.migrations)
        if met := _first_met(segment, (*borrowed, *moved, *evicted)):
            raise InvalidPlanError(f"{segment} is to be evicted, and positions {met} of it are to be used")
        evicted.append(segment)


def tokens_to_pin(case: Case) -> tuple[Counter[InstanceId], Counter[InstanceId]]:
    """Return the tokens on each instance that a plan's migrations read: those unread before, and the others.

    What the plan's requests borrow is read already.
    """
    unread, read = Counter[InstanceId](), Counter[InstanceId]()
    pinned: dict[tuple[OwnerId, InstanceId], tuple[range, ...]] = {}
    for segment in (m.segment for m in case.plan.migrations if m.segment.owner_id in case.snapshot.owners):
        owner_id, positions, instance_id = segment
        before = pinned.get((owner_id, instance_id), ())
        new = subtract((positions,), *before)
        pinned[owner_id, instance_id] = (*before, *new)
        borrowed = (s for b in case.plan.effective_borrowings for s in b.segments)
        taken = [s.positions for s in borrowed if (s.owner_id, s.instance_id) == (owner_id, instance_id)]
        alone = common(subtract(new, *taken), *case.snapshot.owners[owner_id].unread.on(instance_id))
        unread[instance_id] += sum(map(len, alone))
        read[instance_id] += sum(map(len, new)) - sum(map(len, alone))
    return unread, read


def _check_source(owner: OwnerView, migration: KVMigration) -> None:
    segment = migration.segment
    staying = subtract(owner.placement.on(segment.instance_id), *owner.retired.on(segment.instance_id))
    if not is_within(segment.positions, staying):
        raise InvalidPlanError(f"{segment} is to be moved or copied, but is not there, or is to go")


def _check_destination(owner: OwnerView, migration: KVMigration, others: Iterable[KVMigration]) -> None:
    arriving = migration.arriving
    if met := _first_met(arriving, (*owner.placement.segments, *[other.arriving for other in others])):
        raise InvalidPlanError(
            f"{migration.segment} is to go to instance {arriving.instance_id}, "
            f"but positions {met} are there, or arrive"
        )


def _check_moved_once(migration: KVMigration, others: Iterable[KVMigration]) -> None:
    """Check that KV that moves has no other migration: what is copied meanwhile would be one that goes."""
    same = [m for m in others if not (m.keeps_source and migration.keeps_source)]
    if met := _first_met(migration.segment, [m.segment for m in same]):
        raise InvalidPlanError(f"positions {met} of {migration.segment} are to be moved, and again or copied")


def _check_pace(new: Iterable[KVMigration], before: Iterable[KVMigration]) -> None:
    moving: Counter[tuple[InstanceId, InstanceId]] = Counter()
    for migration in (*before, *new):
        moving[migration.link] += len(migration.segment.positions)
    for source_id, destination_id in (migration.link for migration in new):
        if (num_tokens := moving[source_id, destination_id]) > MAX_MOVING_TOKENS:
            raise InvalidPlanError(
                f"{num_tokens} tokens of owners are to be on their way from instance {source_id} to "
                f"{destination_id}; {MAX_MOVING_TOKENS} can be at a time"
            )


def _first_met(segment: KVSegment, others: Iterable[KVSegment]) -> range | None:
    """Return positions of a segment that others of its owner have on its instance, if any."""
    for other in others:
        if (other.owner_id, other.instance_id) == (segment.owner_id, segment.instance_id):
            for met in common((segment.positions,), other.positions):
                return met
    return None
