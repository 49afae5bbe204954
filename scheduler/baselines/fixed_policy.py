"""Baselines with groups that never change: a partition of the instances, and a way to fill a step.

Requests begin first come, first served, on the group with fewest tokens held and promised, once their future
KV fits, and stay there. A group whose prompts are all computed decodes in leases. A prompt that can begin
ends the lease after its present step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from loong.core.cost.cost_model import CostModel
from loong.core.instance import ESPGroup
from loong.core.placement import tokens_by_instance
from loong.core.plan import BatchPlan, IterationPlan, LeaseEnd, Preemption, PreemptionReason, Transfer
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.baselines.fixed_groups import FixedGroup, Load, Partition, groups_of, promised, take
from loong.scheduler.baselines.lightllm import admits
from loong.scheduler.common.cached_prefixes import reading, with_borrowings
from loong.scheduler.common.leases import (
    latest_in_the_way,
    lease_ends,
    plan_lease,
    timed_batch,
)
from loong.scheduler.common.masters import choose_masters, no_instances
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.common.striping import RequestPart, decode_part, retained_part, striped_part, whole_part
from loong.scheduler.config import PolicyConfig


def _has_room(group: FixedGroup, view: RequestView, _config: PolicyConfig) -> bool:
    return group.has_room_for(view)


@dataclass(frozen=True, slots=True)
class Filling:
    """The way to put prompts into steps: `max_tokens` of a step an instance, and a group's step.

    A request begins if its group `admits` it.
    """

    max_tokens: Callable[[PolicyConfig], int]
    step: Callable[[FixedGroup, CostModel, int], BatchPlan | None]
    admits: Callable[[FixedGroup, RequestView, PolicyConfig], bool] = _has_room


def plan_fixed_groups(
    snapshot: Snapshot,
    cost_model: CostModel,
    config: PolicyConfig,
    partition: Partition,
    filling: Filling,
    load: Load = promised,
) -> IterationPlan:
    """Run every idle group of `partition`: a step with prompts if it has any, else a lease.

    A request that waits goes to the group with least `load`.
    """
    parts = partition(tuple(sorted(snapshot.pools)))
    snapshot = reading(snapshot, tuple(parts))
    found, max_tokens = make_planning_view(snapshot), filling.max_tokens(config)
    groups = groups_of(found, parts)
    take(found.waiting, groups, max_tokens, load, lambda group, view: filling.admits(group, view, config))
    batches: list[BatchPlan | None] = []
    ends: list[LeaseEnd] = []
    victims: list[Preemption] = []
    for group in groups:
        has_prompts = bool(group.prefills or group.joining)
        if group.batches:
            ends += lease_ends(group.batches) if has_prompts else ()
        elif leaving := preemptions(group):
            victims += leaving  # the next plan, which follows at once, can use their slots
        elif has_prompts and (step := filling.step(group, cost_model, max_tokens)) is not None:
            batches.append(step)
        elif group.decodes:
            batches.append(plan_lease(group.free, group.decodes, cost_model, config.lease_steps))
    plan = IterationPlan(
        batches=tuple(batch for batch in batches if batch is not None),
        preemptions=tuple(victims),
        lease_ends=tuple(ends),
    )
    return with_borrowings(plan, snapshot)


def preemptions(group: FixedGroup) -> list[Preemption]:
    """Return preemptions of what its instances can never hold, or else of the last that are in the way."""
    if group.too_long:
        return [Preemption(view.request_id, PreemptionReason.TOO_LONG) for view in group.too_long]
    latest = latest_in_the_way(group.decodes + group.prefills, group.num_free)
    return [Preemption(view.request_id) for view in latest]


def _prompts_alone(group: FixedGroup, cost_model: CostModel, max_tokens: int) -> BatchPlan | None:
    """Return whole prompts without decodes: those that fit `max_tokens` an instance, or the first.

    None if there is no room for the first yet, since requests that leave still have theirs.
    """
    views: list[RequestView] = []
    parts: list[RequestPart] = []
    num_left = max_tokens * len(group.instance_ids)
    for view in group.prefills + group.joining:
        num_tokens = view.num_uncomputed_tokens
        if (views and num_tokens > num_left) or not group.begin(view, num_tokens):
            break
        num_left -= num_tokens
        part = _prompt_part(view, num_tokens, group)
        for segment in part.writes:
            group.free[segment.instance_id] -= len(segment.positions)
        views.append(view)
        parts.append(part)
    return timed_batch(group.instance_ids, views, parts, cost_model) if views else None


def _prompt_part(view: RequestView, num_tokens: int, group: FixedGroup) -> RequestPart:
    """Return a prompt striped over the group; its KV stays where it is made, or where it fits."""
    if len(group.instance_ids) == 1:
        return whole_part(view, num_tokens, group.instance_ids[0])
    ring = ESPGroup(group.instance_ids)
    part = striped_part(view, num_tokens, ring, Transfer.KV)
    if all(num_tokens <= group.free[i] for i, num_tokens in tokens_by_instance(part.writes).items()):
        return part
    return retained_part(view, num_tokens, ring, group.free)


def _prompts_in_chunks(group: FixedGroup, cost_model: CostModel, max_tokens: int) -> BatchPlan | None:
    """Return a step with a token of each decode and chunks of prompts in order.

    It has `max_tokens` tokens, but at least one of a prompt, as far as there is room. None if it has none.
    """
    masters = choose_masters(group.decodes, group.free, 1, no_instances)
    assert masters is not None, "those without a slot were preempted"
    views = list(group.decodes)
    parts = [decode_part(view, master_id) for view, master_id in masters]
    num_left = max(1, max_tokens - len(views))
    for _, master_id in masters:
        group.free[master_id] -= 1
    for view in group.prefills + group.joining:
        if not (num_left and group.begin(view, 1)):
            break
        num_tokens = min(num_left, view.num_uncomputed_tokens, group.num_free)
        part = whole_part(view, num_tokens, group.instance_ids[0])
        group.free[group.instance_ids[0]] -= num_tokens
        num_left -= num_tokens
        views.append(view)
        parts.append(part)
    return timed_batch(group.instance_ids, views, parts, cost_model) if views else None


WHOLE_PROMPTS = Filling(lambda config: config.max_num_batched_tokens, _prompts_alone)
SPLIT_FUSE = Filling(lambda config: config.chunk_tokens, _prompts_in_chunks)
LIGHTLLM = replace(SPLIT_FUSE, admits=admits)
