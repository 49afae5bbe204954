"""Prefill and decode on separate instances: the policies `disaggregated-N`.

The first instances compute whole prompts, first come, first served, each instance by itself; the last ones
decode. KV of a request stays on its prefill instance until a decode instance has room for the request's final
length. Then it moves, oldest request first, to the instance with the fewest promised slots. If only one
instance is left, it does both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import inf

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.baselines.fixed_groups import FixedGroup, groups_of, one_per_instance, take
from loong.scheduler.baselines.fixed_policy import WHOLE_PROMPTS, plan_fixed_groups
from loong.scheduler.common.leases import arrival_order, latest_in_the_way, lease_ends, plan_lease
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig


def plan_disaggregated(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, num_decode: int
) -> IterationPlan:
    """Compute waiting prompts, move computed KV, and decode where KV has moved."""
    found = make_planning_view(snapshot)
    groups = groups_of(found, one_per_instance(tuple(found.free)))
    _hold_moving(snapshot, groups)
    _, decode_ids = roles(tuple(sorted(snapshot.pools)), num_decode)
    sources = [group for group in groups if group.instance_ids[0] not in decode_ids]
    destinations = [group for group in groups if group.instance_ids[0] in decode_ids]
    if not destinations:
        return plan_fixed_groups(snapshot, cost_model, config, one_per_instance, WHOLE_PROMPTS)
    gathering = [(group, _scattered(group.prefills, group)) for group in groups]
    gathering += [(group, _scattered(group.decodes, group)) for group in destinations]
    take(found.waiting, sources, config.max_num_batched_tokens)
    take(sorted((view for group in sources for view in group.decodes), key=arrival_order), destinations, inf)
    prefills = [
        WHOLE_PROMPTS.step(group, cost_model, config.max_num_batched_tokens)
        for group in sources
        if (group.joining or group.prefills) and not group.batches
    ]
    moving = [*gathering, *((group, group.joining) for group in destinations)]
    migrations = [migration for group, views in moving for migration in _moves_to(group, views, snapshot)]
    leases: list[BatchPlan | None] = []
    ends: list[LeaseEnd] = []
    victims: list[RequestView] = []
    for group in destinations:
        if group.batches:
            ends += lease_ends(group.batches) if group.decodes else ()
        elif leaving := latest_in_the_way(group.decodes + group.prefills, group.num_free):
            victims += leaving
        elif group.prefills:  # they have lost some KV: it is computed again where the rest is
            here = replace(group, joining=[])
            prefills.append(WHOLE_PROMPTS.step(here, cost_model, config.max_num_batched_tokens))
        elif group.decodes:
            leases.append(plan_lease(group.free, group.decodes, cost_model, config.lease_steps))
    return IterationPlan(
        batches=tuple(batch for batch in (*prefills, *leases) if batch is not None),
        migrations=tuple(migrations),
        preemptions=tuple(Preemption(view.request_id) for view in victims),
        lease_ends=tuple(ends),
    )


@cache
def roles(
    instance_ids: tuple[InstanceId, ...], num_decode: int
) -> tuple[tuple[InstanceId, ...], tuple[InstanceId, ...]]:
    """Return the instances for prompts and those for decodes, the last `num_decode`.

    `instance_ids` are ascending. There is at least one of each kind. If only one instance is left, it is for
    prompts, and decodes there too.
    """
    num_prefill = max(1, len(instance_ids) - num_decode)
    return instance_ids[:num_prefill], instance_ids[num_prefill:]


def max_tokens_moved(pools: Mapping[InstanceId, int], num_decode: int) -> int:
    """Return the most KV that one request may need: the room of a prefill and a decode instance."""
    parts = roles(tuple(sorted(pools)), num_decode)
    return min(max(pools[i] for i in part) for part in parts if part)


def _hold_moving(snapshot: Snapshot, groups: Iterable[FixedGroup]) -> None:
    """Count requests that move on both sides; they keep the room on one until they have it on the other."""
    group_of = {group.instance_ids[0]: group for group in groups}
    for migration in snapshot.migrations:
        view = snapshot.request[migration.segment.owner_id]
        for instance_id in (migration.segment.instance_id, migration.destination_id):
            group_of[instance_id].hold(view, is_in_step=False)


def _scattered(views: list[RequestView], group: FixedGroup) -> list[RequestView]:
    """Remove and return those whose KV is in a group only in part, as after a change of roles."""
    here = set(group.instance_ids)
    found = [view for view in views if not here.issuperset(view.placement.instance_ids)]
    views[:] = [view for view in views if here.issuperset(view.placement.instance_ids)]
    return found


def _moves_to(group: FixedGroup, views: Iterable[RequestView], snapshot: Snapshot) -> Sequence[KVMigration]:
    """Return the moves of requests that join an instance, within its room after its lease."""
    (destination_id,) = group.instance_ids
    num_free = min(snapshot.instance[destination_id].kv_free, group.free[destination_id])
    migrations: list[KVMigration] = []
    for view in views:
        away = [s for s in view.placement.segments if s.instance_id != destination_id]
        num_coming = sum(len(segment.positions) for segment in away)
        num_free -= num_coming
        if num_free < 0:
            break
        group.free[destination_id] -= num_coming
        migrations += (KVMigration(segment, destination_id) for segment in away)
    return migrations
