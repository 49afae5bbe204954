"""The batches of a draft: apart, a lease of decodes and a step of prompts; together, a step of both."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestView
from loong.scheduler.common.leases import first_ends
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.decodes import ServedDecodes
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.layout import instances_for_prompts, step_seconds
from loong.scheduler.esp.lease_timing import end_for, least_lease_seconds
from loong.scheduler.esp.prompt_order import PrefillCandidate
from loong.scheduler.esp.quick import QuickPrompts
from loong.scheduler.esp.reasons import reasons_to_end_leases
from loong.scheduler.esp.service import can_reach, leased
from loong.scheduler.tuning import MIN_ALIGNED_SHARE

PROMPTS_JOIN = "prompts have come that are to be computed with it, on all instances"


def build(draft: PlanDraft) -> PlanDraft:
    """Choose the instances for prompts and those for decodes, and make their batches."""
    decodes = ServedDecodes(draft)
    draft = replace(draft, prompt_ids=instances_for_prompts(draft, decodes))
    is_apart = draft.prompt_ids != draft.everywhere
    return build_apart(draft, decodes) if is_apart else build_together(draft)


def build_apart(draft: PlanDraft, decodes: ServedDecodes) -> PlanDraft:
    """Make a lease of the decodes or a step of quick prompts, and a step of the others where it can begin."""
    quick = QuickPrompts(draft, decodes)
    quick_step = quick.step(BatchBuilder(draft, quick.seconds)) if quick.prefills else None
    lease = decodes.lease() if quick_step is None else None
    ends = first_ends((*quick.lease_ends(), *decodes.lease_ends()))
    others = tuple(prefill for prefill in draft.prefills if prefill not in quick.prefills)
    step = _prompt_step(draft, others) if others else None
    return replace(
        draft,
        batches=tuple(batch for batch in (lease, quick_step, step) if batch is not None),
        lease_ends=ends,
        decisions=(*draft.decisions, *decodes.decisions(lease, ends)),
    )


def _prompt_step(draft: PlanDraft, prefills: tuple[PrefillCandidate, ...]) -> BatchPlan | None:
    """Return a step of prompts; None if too little time is left before the busy instances become idle.

    While some are busy, the step ends with theirs, so that all can begin the next one. It has only prompts
    whose KV it reaches, and none with KV on the busy ones.
    """
    prompt_ids, seconds = draft.prompt_ids, step_seconds(draft)
    idle = tuple(i for i in prompt_ids if i in draft.idle_ids)
    prefills = tuple(p for p in prefills if can_reach(draft.snapshot, p.view, idle))
    if len(idle) < len(prompt_ids):
        seconds, usual = _seconds_until_all_idle(draft, idle), seconds
        if seconds < MIN_ALIGNED_SHARE * usual:
            return None
        prefills = tuple(p for p in prefills if set(p.view.placement.instance_ids) <= set(idle))
    if not idle or not prefills:
        return None
    return BatchBuilder(draft, seconds).with_prompts(idle, (), prefills)


def build_together(draft: PlanDraft) -> PlanDraft:
    """Make a step of both on all instances. While some are busy, the others decode."""
    instance_ids = draft.prompt_ids
    if draft.idle_ids.issuperset(instance_ids):
        builder = BatchBuilder(draft, step_seconds(draft))
        batch = lease_before_prompts(draft, builder)
        batch = batch or batch_of_all(draft, builder, instance_ids)
        return replace(draft, batches=() if batch is None else (batch,))
    ends = tuple(
        end
        for batch in (draft.snapshot.batches if draft.prefills else ())
        for end in end_for(draft, draft.prefills, batch)
    )
    idle, meanwhile = tuple(sorted(draft.idle_ids)), None
    if idle and draft.decodes:
        meanwhile = BatchBuilder(draft, step_seconds(draft)).lease(
            idle, _leased(draft, idle), _seconds_until_all_idle(draft, idle)
        )
    return replace(
        draft,
        batches=() if meanwhile is None else (meanwhile,),
        lease_ends=ends,
        decisions=(*draft.decisions, *reasons_to_end_leases(draft.snapshot, ends, PROMPTS_JOIN)),
    )


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


def _seconds_until_all_idle(draft: PlanDraft, idle: Iterable[InstanceId]) -> float:
    """Return the seconds from when `idle` instances can begin until all that are to compute prompts are idle.

    The batches of some of them may still be ending.
    """
    snapshot, prompt_ids = draft.snapshot, set(draft.prompt_ids)
    begins = max((snapshot.predicted_ends.get(i, 0.0) for i in idle), default=0.0)
    ends = (b.step_ends_at for b in snapshot.batches if not prompt_ids.isdisjoint(b.plan.group.instance_ids))
    return max(0.0, max(ends, default=0.0) - max(begins, snapshot.now))
