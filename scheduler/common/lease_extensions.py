"""Extensions of leases where nothing else is to be done, so that no device waits for a new one.

An extension does what a plan at the lease's end would do again: the same requests, masters and instances.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, LeaseExtension
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.tuning import (
    LONG_LEASE_FACTOR,
    LONG_LEASE_KV_SHARE,
    MAX_EXTENSION_FACTOR,
    MIN_LIVE_SHARE,
)


def extending(plan: IterationPlan, snapshot: Snapshot, lease_steps: int) -> IterationPlan:
    """Return the plan with extensions of ending leases that may go on.

    They get `lease_steps` more steps, or more where a lease is alone.
    """
    ending = [batch for batch in snapshot.batches if batch.is_ending]
    if not ending or _is_anything_else_planned(plan, snapshot):
        return plan
    extensions = tuple(_extensions(ending, plan, snapshot, lease_steps))
    return replace(plan, lease_extensions=extensions) if extensions else plan


def _is_anything_else_planned(plan: IterationPlan, snapshot: Snapshot) -> bool:
    """Return whether a request waits, also for others to end or to move."""
    if snapshot.waiting or snapshot.migrations:
        return True
    if plan.migrations or plan.preemptions or plan.lease_ends or plan.failures:
        return True
    planned = {request_id for batch in plan.batches for request_id in batch.request_ids}
    waiting = (v for v in snapshot.running if v.batch_id is None and not v.has_ended)
    return any(view.request_id not in planned for view in waiting)


def _extensions(
    ending: Iterable[RunningBatch], plan: IterationPlan, snapshot: Snapshot, lease_steps: int
) -> Iterator[LeaseExtension]:
    free = {**snapshot.free, **snapshot.memory_free}
    for batch in plan.batches:
        for instance_id, num_tokens in batch.num_stored_tokens.items():
            free[instance_id] -= num_tokens
    candidates = []
    for running in ending:
        views = [snapshot.request[request_id] for request_id in running.plan.request_ids]
        live = [view for view in views if not view.has_ended]
        if len(live) >= MIN_LIVE_SHARE * len(views) and _belong_together(running.plan, live):
            num_more = _num_more(running.plan, live, free, lease_steps)
            if num_more:
                extension = LeaseExtension(running.batch_id, running.plan.num_steps + num_more)
                candidates.append((extension, num_more * len(live)))
    # The first request to end must find room, and so will the others then: see `kv_safety.py`.
    num_free = sum(free[i] for i in snapshot.free)
    num_spared = num_free - snapshot.most_tokens  # or more, if the longest request has ended
    if sum(num_slots for _, num_slots in candidates) > num_spared:
        num_spared = num_free - max(view.num_final_tokens for view in snapshot.running)
    for extension, num_slots in candidates:
        if num_slots <= num_spared:
            num_spared -= num_slots
            yield extension


def _num_more(
    plan: BatchPlan, live: Sequence[RequestView], free: Mapping[InstanceId, int], lease_steps: int
) -> int:
    """Return the steps by which a lease is extended; 0 if all end before, or there is room for few."""
    master_ids = [plan.blocks_of(view.request_id)[0].master_id for view in live]
    num_spared = min(int(LONG_LEASE_KV_SHARE * free[i]) // master_ids.count(i) for i in set(master_ids))
    num_left = max(view.num_tokens_to_come for view in live) - plan.num_steps
    least = min(lease_steps, num_left)
    long, is_alone = LONG_LEASE_FACTOR * lease_steps, plan.group.dop == 1
    most, longest = (long, MAX_EXTENSION_FACTOR * long) if is_alone else (lease_steps, long)
    num_more = min(most, num_left, num_spared, longest - plan.num_steps)
    return num_more if num_more >= least > 0 else 0


def _belong_together(plan: BatchPlan, live: Sequence[RequestView]) -> bool:
    """Return whether requests that share instances still tie the whole group together."""
    if plan.group.dop == 1:
        return True
    apart = [{*view.placement.instance_ids, plan.blocks_of(view.request_id)[0].master_id} for view in live]
    joined = apart.pop()
    while met := [instance_ids for instance_ids in apart if not joined.isdisjoint(instance_ids)]:
        joined = joined.union(*met)
        apart = [instance_ids for instance_ids in apart if joined.isdisjoint(instance_ids)]
    return joined.issuperset(plan.group.instance_ids)  # holders outside the group may be among them
