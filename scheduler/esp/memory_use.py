"""The use of memory instances: whether KV of decodes is to be on any, in what is planned now."""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import InstanceWork, StepWork
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, OwnerView
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.slo_targets import tightest_tpot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.tuning import PLANNED_TPOT_SHARE


def needs_memory(snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig) -> bool:
    """Return whether memory instances have KV that requests read, or are to have some.

    They are if a request is too long for full instances, or a lease misses its TPOT targets. So they are if
    not all fit elsewhere at their ends, and serving more of them pays.
    """
    if any(snapshot.instance[i].kv_used for i in snapshot.memory_pools):
        return True
    if snapshot.most_tokens > sum(snapshot.pools.values()):
        return True
    if not fits_elsewhere(snapshot):
        return pays_for_room(snapshot, cost_model)
    return any(_is_slow(batch, snapshot, config) for batch in snapshot.batches if batch.plan.num_steps > 1)


def fits_elsewhere(snapshot: Snapshot) -> bool:
    """Return whether all requests fit into full instances at their ends."""
    live = (view for view in (*snapshot.waiting, *snapshot.running) if not view.has_ended)
    return sum([view.num_final_tokens for view in live]) <= sum(snapshot.pools.values())


def without_memory(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot without memory instances and what is cached there. No request reads any of it."""
    gone = snapshot.memory_pools.keys()
    if not gone:
        return snapshot

    def elsewhere(view: RequestView) -> RequestView:
        cached = tuple([part for part in view.cached if part.segment.instance_id not in gone])
        return view if len(cached) == len(view.cached) else replace(view, cached=cached)

    return replace(
        snapshot,
        instances=tuple([i for i in snapshot.instances if i.instance_id not in gone]),
        waiting=tuple(map(elsewhere, snapshot.waiting)),
        owners={owner_id: _without(owner, gone) for owner_id, owner in snapshot.owners.items()},
    )


def _without(owner: OwnerView, instance_ids: Iterable[InstanceId]) -> OwnerView:
    for i in instance_ids:
        owner = owner._replace(
            placement=owner.placement.without(i),
            unread=owner.unread.without(i),
            retired=owner.retired.without(i),
        )
    return owner


def _is_slow(lease: RunningBatch, snapshot: Snapshot, config: PolicyConfig) -> bool:
    views = map(snapshot.request.__getitem__, lease.plan.request_ids)
    return (lease.plan.predicted_time or 0.0) > PLANNED_TPOT_SHARE * tightest_tpot(views, config)


def pays_for_room(snapshot: Snapshot, cost_model: CostModel) -> bool:
    """Return whether as many decodes as have room anywhere make more tokens than those that need no service.

    KV that has no room on full instances is served, equal parts on all memory instances.
    """
    live = [view for view in (*snapshot.waiting, *snapshot.running) if not view.has_ended]
    if not live:
        return False
    num_tokens = max(1, sum([view.num_final_tokens for view in live]) // len(live))
    own, memory = sum(snapshot.pools.values()), sum(snapshot.memory_pools.values())
    num_kept, num_all = (min(len(live), room // num_tokens) for room in (own, own + memory))
    kept, served = (
        _seconds_of(snapshot, cost_model, num_kept, number, num_tokens) for number in (0, num_all - num_kept)
    )
    return num_all * kept > num_kept * served


def _seconds_of(
    snapshot: Snapshot, cost_model: CostModel, num_kept: int, num_served: int, num_tokens: int
) -> float:
    """Return the seconds of a step of an instance with its part of all decodes, some of which are served."""
    instance_id, number = next(iter(snapshot.pools)), len(snapshot.pools)
    kept, served = (ceil(num / number) for num in (num_kept, num_served))
    memory_ids = snapshot.memory_pools if served else ()
    work = InstanceWork(
        num_requests=kept + served,
        num_segments=kept + served * len(memory_ids),
        num_tokens=kept + served,
        num_blocks=kept + served,
        num_attends=kept + served,
        num_decode_keys=kept * num_tokens + served,
        num_sent_queries=served * len(memory_ids),
    )
    holder = InstanceWork(
        num_requests=work.num_requests,
        num_segments=work.num_segments,
        num_attends=served,
        num_decode_keys=ceil(served * num_tokens / max(1, len(memory_ids))),
        num_sent_queries=served,
    )
    step = StepWork(
        ESPGroup((instance_id,)),
        {instance_id: work},
        has_ring=False,
        has_exchange=served > 0,
        is_first=False,
        is_lease=True,
        holders=dict.fromkeys(memory_ids, holder),
        idle_holder_ids=frozenset(memory_ids),
    )
    if not served:
        return cost_model.step_time(step)
    reading = (number - 1) * cost_model.served_time(holder) / cost_model.step_time(step)
    return cost_model.step_time(replace(step, read_shares=dict.fromkeys(memory_ids, min(1.0, reading))))
