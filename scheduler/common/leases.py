"""Decode batches of existing groups: leases, masters, and preemption where slots lack."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from operator import attrgetter

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import InstanceWork, StepWork, WorkCount, step_work
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, Placement
from loong.core.plan import BatchPlan, LeaseEnd
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch
from loong.scheduler.common.masters import choose_lease, no_instances
from loong.scheduler.common.striping import RequestPart, batch_of, decode_part


def arrival_order(view: RequestView) -> tuple[float, str]:
    """Return the sort key of first come, first served; ids break ties."""
    return view.arrival_time, view.request_id


def timed_batch(
    instance_ids: tuple[InstanceId, ...],
    views: Iterable[RequestView],
    parts: Iterable[RequestPart],
    cost_model: CostModel,
    num_steps: int = 1,
) -> BatchPlan:
    """Return the batch of these instances for the `parts` of `views`, with its predicted time."""
    group = ESPGroup(instance_ids)
    batch = batch_of(group, parts, num_steps)
    work = step_work(batch, {view.request_id: view.placement for view in views}, is_first=num_steps == 1)
    return BatchPlan(group, batch.queries, batch.writes, num_steps, cost_model.step_time(work))


def plan_lease(
    free: Mapping[InstanceId, int],
    views: Sequence[RequestView],
    cost_model: CostModel,
    lease_steps: int,
) -> BatchPlan | None:
    """Return a lease of all `views` on all instances of `free`, their free slots, with masters spread evenly.

    It has up to `lease_steps` steps, fewer where slots are few. None if there is not a slot for each request.
    """
    found = choose_lease(views, free, lease_steps, no_instances)
    if found is None:
        return None
    num_steps, masters = found
    parts = [decode_part(view, master_id, num_steps) for view, master_id in masters]
    return timed_batch(tuple(sorted(free)), views, parts, cost_model, num_steps)


def in_micro_batches(
    batch: BatchPlan, views: Sequence[RequestView], cost_model: CostModel, most: int
) -> BatchPlan:
    """Return a lease in as many micro-batches, at most `most`, as make a step shortest."""
    placements = {view.request_id: view.placement for view in views}
    if batch.num_steps == 1 or not batch.holder_ids(placements.values()):
        return batch
    options = [batch]
    for number in range(2, min(most, len(views)) + 1):
        cut = replace(batch, num_micro_batches=number)
        seconds = cost_model.step_time(step_work(cut, placements, is_first=False))
        options.append(replace(cut, predicted_time=seconds))
    return min(options, key=lambda option: option.predicted_time or 0.0)


def rotating(batch: BatchPlan, views: Sequence[RequestView], cost_model: CostModel) -> BatchPlan:
    """Return a lease whose micro-batches rotate over its instances if that is faster, or else the lease."""
    number = batch.group.dop + 1
    if batch.num_steps == 1 or not 2 < number <= len(views):
        return batch
    placements = {view.request_id: view.placement for view in views}
    cut = replace(batch, num_micro_batches=number, rotates=True)
    seconds = cost_model.step_time(step_work(cut, placements, is_first=False))
    is_faster = batch.predicted_time is None or seconds < batch.predicted_time
    return replace(cut, predicted_time=seconds) if is_faster else batch


def decode_seconds(
    instance_ids: tuple[InstanceId, ...],
    placements: Iterable[Placement],
    cost_model: CostModel,
    *,
    are_holders_idle: bool = False,
) -> float:
    """Return the seconds of a step of a lease of decodes with this KV, with masters in turn."""
    count = WorkCount(instance_ids, is_lease=True)
    for master_id, placement in zip(cycle(instance_ids), placements, strict=False):
        count.add_decode(master_id, placement)
    work = count.step(ESPGroup(instance_ids), is_first=False)
    if are_holders_idle:
        work = replace(work, idle_holder_ids=frozenset(work.holders))
    return cost_model.step_time(work)


def lease_start_time(instance_ids: tuple[InstanceId, ...], num_decodes: int, cost_model: CostModel) -> float:
    """Return the seconds to send `num_decodes` decodes to a group, for any number of steps."""
    work = InstanceWork(num_requests=num_decodes, num_tokens=num_decodes, num_decode_keys=num_decodes)
    first = StepWork(
        ESPGroup(instance_ids), dict.fromkeys(instance_ids, work), has_ring=False, has_exchange=False
    )
    return cost_model.step_time(first) - cost_model.step_time(replace(first, is_first=False))


def lease_ends(batches: Iterable[RunningBatch]) -> tuple[LeaseEnd, ...]:
    """Return ends for those of `batches` that can end early, after their present step."""
    return tuple(
        LeaseEnd(batch.batch_id, batch.num_steps_taken + 1) for batch in batches if batch.can_end_early
    )


def first_ends(ends: Iterable[LeaseEnd]) -> tuple[LeaseEnd, ...]:
    """Return the end of each lease at the first step of those given for it."""
    last_first = sorted(ends, key=attrgetter("step"), reverse=True)
    return tuple({end.batch_id: end for end in last_first}.values())


def latest_in_the_way(views: Iterable[RequestView], num_free: int) -> list[RequestView]:
    """Return the latest arrivals, never the first, whose KV must go so that each other one can be computed.

    A decode needs a slot, others one for each missing position.
    """
    staying, leaving = sorted(views, key=arrival_order), []
    num_needed = sum([view.num_uncomputed_tokens for view in staying])
    while len(staying) > 1 and num_free < num_needed:
        latest = staying.pop()
        leaving.append(latest)
        num_free += latest.num_own_tokens
        num_needed -= latest.num_uncomputed_tokens
    return leaving
