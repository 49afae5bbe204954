"""The stages of a plan, each a function from draft to draft.

The stage that makes batches is `build_in_one_group`, or that of `policy.py`, which chooses instances.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.scheduler.common.leases import arrival_order, first_ends
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import PrefillAdmission
from loong.scheduler.esp.batches import batch_of_all, build_together
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.draft import Layout, PlanDraft, Variant
from loong.scheduler.esp.kv_safety import kv_safety
from loong.scheduler.esp.late_prompts import pause_late
from loong.scheduler.esp.layout import step_seconds
from loong.scheduler.esp.reasons import (
    PAUSED,
    explain,
    reason_to_preempt,
    reason_to_wait,
    reasons_while_busy,
)
from loong.scheduler.tuning import LONG_LEASE_FACTOR

Stage: TypeAlias = Callable[[PlanDraft], PlanDraft]


def build_in_one_group(draft: PlanDraft) -> PlanDraft:
    """Make a batch of prompts and decodes on all instances."""
    return build_together(replace(draft, layout=Layout(draft.everywhere, is_mixed=True)))


def plan_part(
    part: Snapshot,
    cost_model: CostModel,
    config: PolicyConfig,
    cluster_size: int,
    variant: Variant,
    build: Stage = build_in_one_group,
) -> IterationPlan:
    """Plan a part of a cluster of `cluster_size` instances; the stage `build` makes batches."""
    if not is_any_usable(part, part.pools):
        return plan_while_busy(part)
    view = make_planning_view(part, cluster_size)
    return planned(PlanDraft(view, cost_model, config, variant), build)


def planned(draft: PlanDraft, build: Stage) -> IterationPlan:
    """Return the plan of a new draft, whose batches the stage `build` makes."""
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


def admit(draft: PlanDraft) -> PlanDraft:
    """Order the prompts, defer those that would make others late, and admit those with room."""
    admission = PrefillAdmission(draft.view, draft.cost_model, draft.config, draft.variant.order).admit()
    return replace(draft, prefills=tuple(admission.prefills), refused=admission.refused)


def pause_unsafe(draft: PlanDraft) -> PlanDraft:
    """Pause the requests whose next slots others need to end."""
    most_steps = draft.config.lease_steps * (LONG_LEASE_FACTOR if draft.view.is_quiet else 1)
    safe = kv_safety(draft.view, draft.prefills, most_steps)
    decisions = (reason_to_wait(sorted(safe.paused_ids), PAUSED),) if safe.paused_ids else ()
    return replace(
        draft,
        prefills=tuple(p for p in draft.prefills if p.view.request_id not in safe.paused_ids),
        decodes=tuple(view for view in draft.view.decodes if view.request_id not in safe.paused_ids),
        lease_steps=safe.lease_steps,
        decisions=draft.decisions + decisions,
    )


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
