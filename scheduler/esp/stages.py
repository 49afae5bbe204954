"""The stages of a plan, each a function from draft to draft, for a whole cluster or a part of it."""

from collections.abc import Iterable
from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.scheduler.common.leases import arrival_order, first_ends
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import Admission, admit
from loong.scheduler.esp.batches import batch_of_all, build
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.draft import PlanDraft, Variant
from loong.scheduler.esp.kv_safety import pause_unsafe
from loong.scheduler.esp.late_prompts import pause_late
from loong.scheduler.esp.long_contexts import scale_up
from loong.scheduler.esp.prompt_order import Ordering
from loong.scheduler.esp.reasons import explain, reason_to_preempt, reasons_while_busy
from loong.scheduler.esp.step_time import step_seconds


def plan_part(
    part: Snapshot, cost_model: CostModel, config: PolicyConfig, cluster_size: int, variant: Variant
) -> IterationPlan:
    """Plan a part of a cluster of `cluster_size` instances, or all of it."""
    if not is_any_usable(part, part.pools):
        return plan_while_busy(part)
    ordering = Ordering.of(variant.order, cluster_size, cost_model, config)
    draft = PlanDraft(make_planning_view(part), cost_model, config, variant, ordering)
    return plan_admitted(draft, admit(draft.view.queue, ordering))


def plan_admitted(draft: PlanDraft, admission: Admission) -> IterationPlan:
    """Take a new draft with the prompts that are admitted through all stages, and return its plan."""
    draft = replace(draft, prefills=admission.prefills, decisions=admission.decisions)
    for stage in (pause_unsafe, pause_late, scale_up, build, relieve, explain):
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
    is_anything_planned = bool(draft.batches or draft.migrations)
    if is_anything_planned or draft.snapshot.is_anything_in_flight or not draft.view.free:
        return draft
    draft = replace(draft, prefills=draft.prefills + draft.paused_late, paused_late=())
    batch = batch_of_all(draft, BatchBuilder(draft, step_seconds(draft)), draft.everywhere)
    if batch is not None:
        return replace(draft, batches=(batch,))
    serving = draft.view.free.keys() | draft.snapshot.memory_free.keys()
    holders = [
        v for v in draft.snapshot.running if v.is_plannable and serving >= set(v.placement.instance_ids)
    ]
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
        migrations=tuple(migration for plan in each for migration in plan.migrations),
        preemptions=tuple(preemption for plan in each for preemption in plan.preemptions),
        lease_ends=first_ends(end for plan in each for end in plan.lease_ends),
        decisions=tuple(decision for plan in each for decision in plan.decisions),
    )
