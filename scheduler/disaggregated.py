"""Prefill and decode on instances of their own: the policy `disaggregated`.

Instances with even ids compute whole prompts, first come, first served, each by itself; those with odd ids
decode. A request's KV stays with the one that computed it until a decode instance has room for all that the
request will come to, oldest first, and moves to the one with least promised. When all of either kind are
lost, those left are replicas that do both.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from loong.core.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.baselines import WHOLE_PROMPTS, plan_fixed_groups
from loong.scheduler.config import PolicyConfig
from loong.scheduler.fixed_groups import FixedGroup, groups_of, one_per_instance, take
from loong.scheduler.leases import arrival_order, latest_in_the_way, lease_ends, plan_lease
from loong.scheduler.planning_view import make_planning_view


def plan_disaggregated(snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig) -> IterationPlan:
    """Compute what waits, move what is computed, and decode what has been moved."""
    found = make_planning_view(snapshot)
    groups = groups_of(found, one_per_instance(tuple(found.free)))
    _hold_moving(snapshot, groups)
    sources = [group for group in groups if group.instance_ids[0] % 2 == 0]
    destinations = [group for group in groups if group.instance_ids[0] % 2 == 1]
    if not (sources and destinations):
        return plan_fixed_groups(snapshot, cost_model, config, one_per_instance, WHOLE_PROMPTS)
    take(found.waiting, sources, config.max_num_batched_tokens)
    take(sorted((view for group in sources for view in group.decodes), key=arrival_order), destinations, inf)
    prefills = [
        WHOLE_PROMPTS.step(group, cost_model, config.max_num_batched_tokens)
        for group in sources
        if group.joining and not group.batches
    ]
    migrations = [migration for group in destinations for migration in _moves_to(group, snapshot)]
    leases: list[BatchPlan | None] = []
    ends: list[LeaseEnd] = []
    victims: list[RequestView] = []
    for group in destinations:
        if group.batches:
            ends += lease_ends(group.batches) if group.decodes else ()
        elif leaving := latest_in_the_way(group.decodes, group.num_free):
            victims += leaving
        elif group.decodes:
            leases.append(plan_lease(group.free, group.decodes, cost_model, config.lease_steps))
    return IterationPlan(
        batches=(*prefills, *(lease for lease in leases if lease is not None)),
        migrations=tuple(migrations),
        preemptions=tuple(Preemption(view.request_id) for view in victims),
        lease_ends=tuple(ends),
    )


def max_tokens_moved(pools: Mapping[InstanceId, int]) -> int:
    """The most KV that one request may come to: what a prefill and a decode instance can hold.

    If others were lost those of one kind are left, and do both.
    """
    largest = [0, 0]
    for instance_id, num_slots in pools.items():
        half = instance_id % 2
        largest[half] = max(largest[half], num_slots)
    return min(filter(None, largest), default=0)


def _hold_moving(snapshot: Snapshot, groups: Iterable[FixedGroup]) -> None:
    """Count requests that move on both sides; they keep the room on one until they have it on the other."""
    group_of = {group.instance_ids[0]: group for group in groups}
    for migration in snapshot.migrations:
        view = snapshot.request[migration.segment.owner_id]
        for instance_id in (migration.segment.instance_id, migration.destination_id):
            group_of[instance_id].hold(view, is_in_step=False)


def _moves_to(group: FixedGroup, snapshot: Snapshot) -> Sequence[KVMigration]:
    """All KV of those that join a decode instance, as far as there is room beside the lease that runs."""
    (destination_id,) = group.instance_ids
    num_free = snapshot.instance[destination_id].kv_free
    migrations: list[KVMigration] = []
    for view in group.joining:
        num_free -= view.num_computed_tokens
        if num_free < 0:
            break
        group.free[destination_id] -= view.num_computed_tokens
        migrations += (KVMigration(segment, destination_id) for segment in view.placement.segments)
    return migrations
