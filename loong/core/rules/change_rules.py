"""The rules of everything else that a plan changes: KV at rest, leases in flight, and room."""

from collections import Counter

from loong.core.errors import InvalidPlanError
from loong.core.placement import InstanceId, Placement
from loong.core.positions import at_or_after, common, first_overlap
from loong.core.rules.case import Case
from loong.core.rules.copy_rules import tokens_to_pin


def check_migrations(case: Case) -> None:
    """Check that a migration moves KV that is there, no position twice, to an instance that exists."""
    for migration in case.plan.migrations:
        if migration.destination_id not in case.snapshot.instance:
            raise InvalidPlanError(
                f"{migration.segment} is to go to instance {migration.destination_id}: no such"
            )
    moved = [m for m in case.plan.migrations if m.segment.owner_id not in case.snapshot.owners]
    segments = [migration.segment for migration in moved]
    for migration in moved:
        segment = migration.segment
        if not case.view(segment.owner_id).placement.holds(segment):
            raise InvalidPlanError(f"{segment} is to be moved, but is not there")
        if migration.keeps_source:
            raise InvalidPlanError(f"{segment} is to be copied, but belongs to a request: it can only move")
    for owner_id in {segment.owner_id for segment in segments}:
        shared = first_overlap(s.positions for s in segments if s.owner_id == owner_id)
        if shared is not None:
            raise InvalidPlanError(f"positions {shared} of {owner_id} are to be moved twice")


def check_preemptions(case: Case) -> None:
    """Check that only requests with KV are preempted, and none while an ending batch makes some of it."""
    for preemption in case.plan.preemptions:
        if preemption.request_id in case.snapshot.ending_ids:
            raise InvalidPlanError(
                f"request {preemption.request_id} is to be preempted, but its batch is still to end"
            )
        if not case.view(preemption.request_id).placement.segments:
            raise InvalidPlanError(f"request {preemption.request_id} is to be preempted, but has no KV")


def check_evictions(case: Case) -> None:
    """Check that evicted KV is there, does not move or go twice, and is of no request of an ending batch."""
    of_requests = [e.segment for e in case.plan.evictions if e.segment.owner_id not in case.snapshot.owners]
    for segment in of_requests:
        if segment.owner_id in case.snapshot.ending_ids:
            raise InvalidPlanError(f"{segment} is to be evicted, but its request's batch is still to end")
        if not case.view(segment.owner_id).placement.holds(segment):
            raise InvalidPlanError(f"{segment} is to be evicted, but is not there")
    changed = [*of_requests, *(migration.segment for migration in case.plan.migrations)]
    for owner_id in {segment.owner_id for segment in of_requests}:
        twice = first_overlap(s.positions for s in changed if s.owner_id == owner_id)
        if twice is not None:
            raise InvalidPlanError(f"positions {twice} of {owner_id} are to be evicted, and again or moved")


def check_room(case: Case) -> None:
    """Check that the KV to store fits the free slots, with those that preemptions and evictions free."""
    arriving: Counter[InstanceId] = Counter()
    for batch in case.plan.batches:
        arriving.update(batch.num_reserved_tokens)
    for migration in case.plan.migrations:
        arriving[migration.destination_id] += len(migration.segment.positions)
    for extension in case.plan.lease_extensions:
        arriving.update(case.snapshot.extended(extension).num_stored_tokens)
        arriving.subtract(case.snapshot.batch[extension.batch_id].plan.num_stored_tokens)
    freed: Counter[InstanceId] = Counter()
    for preemption in case.plan.preemptions:
        freed.update(case.view(preemption.request_id).own_tokens_by_instance())
    requests = case.snapshot.request
    for segment in (e.segment for e in case.plan.evictions if e.segment.owner_id in requests):
        freed[segment.instance_id] += case.view(segment.owner_id).num_own_tokens_of(segment)
    pinned, read = tokens_to_pin(case)
    arriving.update(pinned)
    if freed:  # these may be the last readers of what others borrow, or copy
        freed.subtract(case.read_tokens_to_borrow)
        freed.subtract(read)
    for instance_id, num_tokens in arriving.items():
        instance = case.snapshot.instance[instance_id]
        if instance.is_draining and num_tokens > pinned[instance_id]:
            raise InvalidPlanError(f"instance {instance_id} is draining, but is to store {num_tokens} tokens")
        free = instance.kv_capacity - instance.kv_used + freed[instance_id]
        if num_tokens > free:
            raise InvalidPlanError(
                f"instance {instance_id} is to store {num_tokens} tokens but has room for {free}"
            )


def check_window_room(case: Case) -> None:
    """Check that new KV fits the memory of layers with a window, where they have less.

    What moves takes its last window there, and what decodes may add meanwhile. What begins to be read keeps
    its last window, in all copies.
    """
    window_free, window = case.snapshot.window_free, case.snapshot.window
    if not window_free:
        return
    stored: Counter[InstanceId] = Counter()
    for batch in case.plan.batches:
        stored.update(batch.num_reserved_tokens)
    for migration in case.plan.migrations:
        stored[migration.destination_id] += min(len(migration.segment.positions), 2 * window)
    for borrowing in case.plan.effective_borrowings:
        read = Placement().adding([s._replace(owner_id=borrowing.request_id) for s in borrowing.segments])
        for owner_id, positions, _ in borrowing.segments:
            seen = at_or_after((positions,), max(0, read.first_missing - window + 1))
            for copy in case.snapshot.owners[owner_id].placement.segments:
                stored[copy.instance_id] += sum(map(len, common(seen, copy.positions)))
    for extension in case.plan.lease_extensions:
        stored.update(case.snapshot.extended(extension).num_stored_tokens)
        stored.subtract(case.snapshot.batch[extension.batch_id].plan.num_stored_tokens)
    for instance_id, num_tokens in stored.items():
        free = window_free.get(instance_id, num_tokens)
        if num_tokens > max(0, free):
            raise InvalidPlanError(
                f"instance {instance_id} is to store {num_tokens} tokens, but layers with a window have room "
                f"for {free}"
            )


def check_lease_ends(case: Case) -> None:
    """Check that only running batches end, once each, and only at a step that is still to come."""
    seen = set()
    for end in case.plan.lease_ends:
        if end.batch_id in seen:
            raise InvalidPlanError(f"the lease of batch {end.batch_id} is to end twice")
        seen.add(end.batch_id)
        batch = case.snapshot.batch.get(end.batch_id)
        if batch is None:
            raise InvalidPlanError(f"the lease of batch {end.batch_id} is to end, but it is not running")
        if not batch.num_steps_taken < end.step <= batch.last_step:
            raise InvalidPlanError(
                f"the lease of batch {end.batch_id} is to end before step {end.step}, "
                f"but has taken {batch.num_steps_taken} of {batch.last_step} steps"
            )


def check_lease_extensions(case: Case) -> None:
    """Check that only leases without an early end are extended, by additional steps and in time."""
    ended_ids = {end.batch_id for end in case.plan.lease_ends}
    extended_ids = [extension.batch_id for extension in case.plan.lease_extensions]
    for extension in case.plan.lease_extensions:
        batch_id, batch = extension.batch_id, case.snapshot.batch.get(extension.batch_id)
        if batch is None or not batch.is_extendable:
            raise InvalidPlanError(f"batch {batch_id} is to go on, but is no lease that can be extended now")
        if extension.num_steps <= batch.plan.num_steps:
            raise InvalidPlanError(
                f"the lease of batch {batch_id} is to be extended to {extension.num_steps} steps, "
                f"but has {batch.plan.num_steps}"
            )
        if batch_id in ended_ids or extended_ids.count(batch_id) > 1:
            raise InvalidPlanError(f"the lease of batch {batch_id} is given two ends at once")
