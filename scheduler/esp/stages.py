"""The stages of a plan, each a function from draft to draft, for a whole cluster or each of its parts."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cluster_parts import Parts, homes_of, split
from loong.scheduler.common.leases import arrival_order, first_ends
from loong.scheduler.common.least_work import assigned_places
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import admit
from loong.scheduler.esp.batches import batch_of_all, build
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.draft import PlanDraft, Variant
from loong.scheduler.esp.kv_safety import pause_unsafe
from loong.scheduler.esp.late_prompts import pause_late
from loong.scheduler.esp.reasons import (
    NOT_CONSIDERED,
    explain,
    reason_to_preempt,
    reason_to_wait,
    reasons_while_busy,
)
from loong.scheduler.esp.step_time import step_seconds


def plan_parts(
    snapshot: Snapshot, parts: Parts, cost_model: CostModel, config: PolicyConfig, variant: Variant
) -> IterationPlan:
    """Assign each prompt to the part with least work, and plan each usable part by itself."""
    found, homes = make_planning_view(snapshot), homes_of(snapshot, parts)
    places, others = assigned_places(found, parts, homes, cost_model, config, variant.order)
    usable = [place for place, part in enumerate(parts) if is_any_usable(snapshot, part)]
    number_of = {place: number for number, place in enumerate(usable)}
    usable_places = {r: number_of[place] for r, place in places.items() if place in number_of}
    plan = joined_plan(
        plan_part(part, cost_model, config, len(snapshot.pools), variant)
        for part in split(snapshot, tuple(parts[place] for place in usable), usable_places)
        if part.waiting or any(view.is_plannable for view in part.running)
    )
    busy: defaultdict[int, list[RequestView]] = defaultdict(list)
    for view in snapshot.waiting:
        place = places.get(view.request_id)
        if place is not None and place not in number_of:
            busy[place].append(view)
    reasons = [r for place, views in busy.items() for r in reasons_while_busy(snapshot, views, parts[place])]
    reasons += reason_to_wait((view.request_id for view in others), NOT_CONSIDERED)
    return replace(plan, decisions=(*plan.decisions, *reasons))


def plan_part(
    part: Snapshot, cost_model: CostModel, config: PolicyConfig, cluster_size: int, variant: Variant
) -> IterationPlan:
    """Plan a part of a cluster of `cluster_size` instances, or all of it."""
    if not is_any_usable(part, part.pools):
        return plan_while_busy(part)
    draft = PlanDraft(make_planning_view(part, cluster_size), cost_model, config, variant)
    for stage in (admit, pause_unsafe, pause_late, build, relieve, explain):
        draft = stage(draft)
    return draft.plan()


def is_any_usable(snapshot: Snapshot, instance_ids: Iterable[InstanceId]) -> bool:
    """Return whether one of these is idle, or in a lease that can end early.

    Otherwise no plan can change anything there.
    """
    batch_ids = (snapshot.instance[i].batch_id for i in instance_ids)
    return any(batch_id is None or snapshot.batch[batch_id].can_end_early for batch_id in batch_ids)


def plan_while_busy(snapshot: Snapshot) -> IterationPlan:
    """Return the plan where nothing can begin or end: only the reasons of new prompts."""
    return IterationPlan(decisions=tuple(reasons_while_busy(snapshot, snapshot.waiting, snapshot.pools)))


def relieve(draft: PlanDraft) -> PlanDraft:
    """Where nothing would run, use the room of all instances together, or preempt the last to come."""
    if draft.batches or draft.snapshot.is_anything_in_flight or not draft.view.free:
        return draft
    draft = replace(draft, prefills=draft.prefills + draft.paused_late)
    batch = batch_of_all(draft, BatchBuilder(draft, step_seconds(draft)), draft.everywhere)
    if batch is not None:
        return replace(draft, batches=(batch,))
    full = draft.view.free.keys()
    holders = [v for v in draft.snapshot.running if v.is_plannable and full >= set(v.placement.instance_ids)]
    if len(holders) < 2:
        return draft  # one alone has room
    latest = max(holders, key=arrival_order)
    reason = reason_to_preempt(latest, len(holders), sum(draft.view.free.values()))
    return replace(draft, preempted=(latest,), decisions=(*draft.decisions, reason))


def joined_plan(plans: Iterable[IterationPlan]) -> IterationPlan:
    """Merge the plans of several parts into one."""
    each = tuple(plans)
    return IterationPlan(
        batches=tuple(batch for plan in each for batch in plan.batches),
        preemptions=tuple(preemption for plan in each for preemption in plan.preemptions),
        lease_ends=first_ends(end for plan in each for end in plan.lease_ends),
        decisions=tuple(decision for plan in each for decision in plan.decisions),
    )
