"""The batches of a draft: apart, a lease of decodes and a step of prompts; together, a step of both."""

from collections.abc import Sequence
from dataclasses import replace

from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestView
from loong.scheduler.common.leases import first_ends
from loong.scheduler.common.service import can_reach, leased
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.decodes import ServedDecodes
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.layout import instances_for_prompts
from loong.scheduler.esp.lease_timing import end_for, least_lease_seconds
from loong.scheduler.esp.long_contexts import lease_of_long, reason_of, suit_prompt_instances
from loong.scheduler.esp.placement import place
from loong.scheduler.esp.proactive import clear_homes, push_ahead, retain
from loong.scheduler.esp.prompt_order import PrefillCandidate
from loong.scheduler.esp.quick import QuickPrompts
from loong.scheduler.esp.step_time import step_seconds


def build(draft: PlanDraft) -> PlanDraft:
    """Choose the instances for prompts and those for decodes, and make their batches."""
    decodes = ServedDecodes(draft)
    draft = replace(draft, prompt_ids=instances_for_prompts(draft, decodes))
    if draft.long and (draft.prompt_ids == draft.everywhere or not suit_prompt_instances(draft)):
        return build(replace(draft, decodes=(*draft.decodes, *draft.long), long=()))
    if draft.prompt_ids == draft.everywhere:
        return build_together(draft)
    placed = place(draft, decodes)
    return build_apart(placed, decodes if placed is draft else ServedDecodes(placed, decodes.instance_ids))


def build_apart(draft: PlanDraft, decodes: ServedDecodes) -> PlanDraft:
    """Make a lease of the decodes or a step of quick prompts, and a step of the others where it can begin."""
    quick = QuickPrompts(draft, decodes)
    quick_step = quick.step(BatchBuilder(draft, quick.seconds))
    leases = tuple(decodes.new_leases(None if quick_step is None else quick.instance_id))
    ends = first_ends((*quick.lease_ends(), *decodes.lease_ends()))
    others = [prefill for prefill in draft.prefills if prefill not in quick.all_prefills]
    is_ready = draft.idle_ids.issuperset(draft.prompt_ids)
    long = lease_of_long(draft) if is_ready and draft.long else None
    step = _prompt_step(draft, others) if is_ready and others and long is None else None
    draft = replace(
        draft,
        batches=tuple(batch for batch in (*leases, quick_step, long, step) if batch is not None),
        lease_ends=ends,
        decisions=(
            *draft.decisions,
            *decodes.decisions(leases),
            *(() if long is None else (reason_of(long, draft),)),
        ),
    )
    return push_ahead(clear_homes(draft, decodes), decodes)


def _prompt_step(draft: PlanDraft, prefills: Sequence[PrefillCandidate]) -> BatchPlan | None:
    """Return a step of these prompts, whose KV all serve."""
    return BatchBuilder(draft, step_seconds(draft)).with_prompts(draft.prompt_ids, (), prefills)


def build_together(draft: PlanDraft) -> PlanDraft:
    """Make a step of both on all instances, once all are idle. What waits for that ends leases."""
    instance_ids = draft.prompt_ids
    if draft.idle_ids.issuperset(instance_ids):
        builder = BatchBuilder(draft, step_seconds(draft))
        batch = lease_before_prompts(draft, builder)
        batch = batch or batch_of_all(draft, builder, instance_ids)
        return retain(replace(draft, batches=() if batch is None else (batch,)))
    waits = bool(draft.prefills or draft.decodes)
    ends = tuple(end for b in draft.snapshot.batches if waits for end in end_for(draft, draft.prefills, b))
    return replace(draft, lease_ends=ends)


def lease_before_prompts(draft: PlanDraft, builder: BatchBuilder) -> BatchPlan | None:
    """Return a lease during which new prompts are collected, where planning for each costs too much."""
    if not draft.prefills or any(prefill.is_begun for prefill in draft.prefills):
        return None
    first = min(prefill.view.arrival_time for prefill in draft.prefills)
    instance_ids = draft.prompt_ids
    least = least_lease_seconds(draft, draft.prefills, instance_ids, len(draft.decodes))
    seconds = first + least - draft.snapshot.now
    return builder.lease(instance_ids, _leased(draft, instance_ids), seconds) if seconds > 0 else None


def batch_of_all(
    draft: PlanDraft, builder: BatchBuilder, instance_ids: tuple[InstanceId, ...]
) -> BatchPlan | None:
    """Return the next batch of these instances, with all that they reach."""
    prefills = tuple(p for p in draft.prefills if can_reach(draft.snapshot, p.view, instance_ids))
    decodes = _leased(draft, instance_ids)
    if prefills:
        decodes = [view for view in decodes if can_reach(draft.snapshot, view, instance_ids)]
        return builder.with_prompts(instance_ids, decodes, prefills)
    return builder.lease(instance_ids, decodes)


def _leased(draft: PlanDraft, instance_ids: tuple[InstanceId, ...]) -> Sequence[RequestView]:
    """Return the decodes that a lease of these instances can have."""
    return leased(draft.snapshot, draft.decodes, instance_ids)
