"""Decodes and prompts on instances of their own where that pays, with no KV moved: the policy `esp-served`.

The last instances decode, as few as meet the TPOT target. The others compute prompts in one group. All serve
the KV that they have computed, so a change of groups moves nothing. Where steps with decodes and prompts on
all instances leave prompts more of the cluster, they run together. Where all prompts are short and targets
loose, each instance runs its own requests.

A plan is made in stages. Each takes a draft, and returns one that says more.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.plan import IterationPlan
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot
from loong.scheduler.baselines.esp_fixed import plan_parts
from loong.scheduler.common.cluster_parts import groups_of
from loong.scheduler.common.leases import arrival_order
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.common.slo_targets import target_tpot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import PrefillAdmission, by_deadline
from loong.scheduler.esp.kv_safety import kv_safety
from loong.scheduler.esp.reasons import (
    DEFERRED_BY_DEADLINE,
    reason_to_pause,
    reason_to_preempt,
    reasons_to_begin,
    reasons_to_defer,
)
from loong.scheduler.served.batches import batch_builder, batch_of_all, build_apart, build_together
from loong.scheduler.served.decodes import ServedDecodes
from loong.scheduler.served.draft import PlanDraft
from loong.scheduler.served.layout import lay_out
from loong.scheduler.served.service import can_reach
from loong.scheduler.tuning import LONG_LEASE_FACTOR, PLANNED_TPOT_SHARE

BUSY = "the instances that are to compute it are in a step, or decode first"
FULL_STEP = "the step of its instances is full of more urgent prompts"

Stage: TypeAlias = Callable[[PlanDraft], PlanDraft]


def plan_esp_served(snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig) -> IterationPlan:
    """Plan every instance that can run now."""
    instance_ids = tuple(sorted(snapshot.pools))
    if has_only_short_prompts(snapshot, cost_model, config):
        plan = plan_parts(snapshot, groups_of(instance_ids, 1), cost_model, config, len(instance_ids))
        if (plan.batches or snapshot.is_anything_in_flight) and not plan.preemptions:
            return plan  # otherwise one has too little room for what it has, and all together may have it
    draft = PlanDraft(make_planning_view(snapshot), cost_model, config)
    for stage in STAGES:
        draft = stage(draft)
    return draft.plan()


def has_only_short_prompts(snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig) -> bool:
    """Return whether each instance can run requests by itself.

    That is so if every request fits into the KV of each, and its prompt into a step of one. TPOT targets must
    leave most of a step with decodes to prompts. Where instances do not serve such steps, all KV of a request
    must be on one of them.
    """
    if snapshot.most_tokens > min(snapshot.pools.values()):
        return False
    live = [view for view in snapshot.request.values() if not view.has_ended]
    if not all(any(can_reach(snapshot, view, (i,)) for i in snapshot.pools) for view in live):
        return False
    target = min((target_tpot(view, config) for view in live), default=config.target_tpot)
    alone = cost_model.prefill_terms(1)
    most_tokens = alone.max_tokens(config.step_time, 0)
    is_loose = alone.least <= PLANNED_TPOT_SHARE * target / 2
    return is_loose and all(view.is_decoding or view.num_prompt_tokens <= most_tokens for view in live)


def admit(draft: PlanDraft) -> PlanDraft:
    """Order the prompts, defer those that would make others late, and admit those with room."""
    admission = PrefillAdmission(draft.view, draft.cost_model, draft.config, by_deadline).admit()
    return replace(draft, prefills=tuple(admission.prefills), refused=admission.refused)


def pause_unsafe(draft: PlanDraft) -> PlanDraft:
    """Pause the requests whose next slots others need to end."""
    most_steps = draft.config.lease_steps * (LONG_LEASE_FACTOR if draft.view.is_quiet else 1)
    safe = kv_safety(draft.view, draft.prefills, most_steps)
    decodes = (view for instance_set in draft.view.occupied for view in instance_set.decodes)
    decisions = (reason_to_pause(safe.paused_ids),) if safe.paused_ids else ()
    return replace(
        draft,
        prefills=tuple(p for p in draft.prefills if p.view.request_id not in safe.paused_ids),
        decodes=tuple(view for view in decodes if view.request_id not in safe.paused_ids),
        lease_steps=safe.lease_steps,
        decisions=draft.decisions + decisions,
    )


def build(draft: PlanDraft) -> PlanDraft:
    """Choose the instances for decodes and for prompts, and make their batches."""
    decodes = ServedDecodes.of(
        draft.snapshot, draft.cost_model, draft.config, draft.decodes, draft.lease_steps
    )
    draft = replace(draft, layout=lay_out(draft, decodes))
    return build_together(draft) if draft.layout.is_mixed else build_apart(draft, decodes)


def relieve(draft: PlanDraft) -> PlanDraft:
    """Where nothing would run, use the room of all instances together, or preempt the last to come."""
    if draft.batches or draft.snapshot.is_anything_in_flight or not draft.view.free:
        return draft
    everywhere = tuple(sorted(draft.view.free))
    batch = batch_of_all(draft, batch_builder(draft), everywhere)
    if batch is not None:
        return replace(draft, batches=(batch,))
    full = draft.view.free.keys()
    holders = [v for v in draft.snapshot.running if v.is_plannable and full >= set(v.placement.instance_ids)]
    if len(holders) < 2:
        return draft  # one alone has room
    latest = max(holders, key=arrival_order)
    reason = reason_to_preempt(latest, len(holders), sum(draft.view.free.values()))
    return replace(draft, preempted=(latest,), decisions=(*draft.decisions, reason))


def explain(draft: PlanDraft) -> PlanDraft:
    """Add the reasons for which prompts begin, are deferred or wait."""
    computed = [prefill for prefill in draft.prefills if prefill.view.request_id in draft.batch_of]
    decisions = (
        *reasons_to_begin(computed, draft.batch_of, draft.cost_model, draft.view),
        *reasons_to_defer(computed),
        *_reasons_to_wait(draft),
    )
    return replace(draft, decisions=draft.decisions + decisions)


STAGES: tuple[Stage, ...] = (admit, pause_unsafe, build, relieve, explain)


def _reasons_to_wait(draft: PlanDraft) -> Iterator[Decision]:
    waiting: dict[str, list[RequestId]] = {}
    for refusal, refused in draft.refused.items():
        waiting.setdefault(refusal.value, []).extend(view.request_id for view in refused)
    is_any_computed = any(prefill.view.request_id in draft.batch_of for prefill in draft.prefills)
    for prefill in draft.prefills:
        if prefill.view.request_id not in draft.batch_of:
            usual = FULL_STEP if is_any_computed else BUSY
            reason = DEFERRED_BY_DEADLINE if prefill.is_deferred else usual
            waiting.setdefault(reason, []).append(prefill.view.request_id)
    for reason, request_ids in waiting.items():
        yield Decision(DecisionKind.WAIT, tuple(request_ids), reason)
