"""Decodes whose context is too long for one instance: they scale up to several masters.

Such a request misses its TPOT target if one instance reads all of its KV. So it does if the instances that
hold it serve the reads between their chunks. But together, the instances that computed the prompt read it in
time: each its part, which need not move. So they take the steps of the answer first, and prompts pause.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.placement import InstanceId, Placement
from loong.core.plan import BatchPlan
from loong.core.request import RequestView
from loong.scheduler.common.leases import arrival_order, decode_seconds, plan_lease
from loong.scheduler.common.masters import num_stored
from loong.scheduler.common.service import leased
from loong.scheduler.common.slo_targets import target_tpot, tightest_tpot
from loong.scheduler.config import MOST_LEASE_STEPS
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.homes import moved_to
from loong.scheduler.tuning import PLANNED_TPOT_SHARE


def scale_up(draft: PlanDraft) -> PlanDraft:
    """Take decodes with too long a context from the others, while no prompt is late by the pause for them."""
    if not (draft.decodes and draft.variant.has_masters and draft.is_roomy and len(draft.everywhere) > 2):
        return draft
    contexts = _Contexts(draft)
    longest = max(draft.decodes, key=lambda view: view.placement.num_tokens)
    tightest = tightest_tpot(draft.decodes, draft.config)
    if contexts.moved_seconds(longest) <= PLANNED_TPOT_SHARE * tightest:
        return draft
    long = list[RequestView]()
    for view in sorted(draft.decodes, key=arrival_order):
        if contexts.is_too_long(view) and contexts.are_in_time([*long, view]):
            long.append(view)
    if not long:
        return draft
    decodes = tuple(view for view in draft.decodes if view not in long)
    return replace(draft, decodes=decodes, long=tuple(long))


def suit_prompt_instances(draft: PlanDraft) -> bool:
    """Return whether they meet their targets on the instances for prompts, which have room for all."""
    snapshot, ids = draft.snapshot, draft.prompt_ids
    num_free = sum(max(0, snapshot.free[i]) for i in ids)
    if num_free < num_stored(draft.long, MOST_LEASE_STEPS):
        return False
    are_reached = len(leased(snapshot, draft.long, ids)) == len(draft.long)
    return are_reached and _Contexts(draft, ids).are_quick(draft.long)


def lease_of_long(draft: PlanDraft) -> BatchPlan | None:
    """Return a lease of them on all instances for prompts; None without room for a step of each."""
    free = {i: draft.snapshot.free[i] for i in draft.prompt_ids}
    num_steps = min(MOST_LEASE_STEPS, max(view.num_remaining_tokens for view in draft.long))
    return plan_lease(free, draft.long, draft.cost_model, num_steps)


def reason_of(lease: BatchPlan, draft: PlanDraft) -> Decision:
    """Return why a lease of them has several masters."""
    contexts, views = _Contexts(draft, draft.prompt_ids), draft.long
    chosen = f"decodes on {lease.group.dop} instances, masters of the parts of KV that they hold"
    alternatives = (
        Alternative(chosen, contexts.group_seconds(views)),
        Alternative("decodes on 1, which reads KV where it is", max(map(contexts.served_seconds, views))),
        Alternative("decodes on 1, to which KV moves", max(map(contexts.moved_seconds, views))),
    )
    return Decision(DecisionKind.DOP, lease.request_ids, chosen, alternatives)


class _Contexts:
    """The seconds of steps of decodes of a draft, on the last instance or on several, mostly all others."""

    def __init__(self, draft: PlanDraft, masters: tuple[InstanceId, ...] | None = None) -> None:
        self._draft, self._last = draft, draft.everywhere[-1]
        self._masters = draft.everywhere[:-1] if masters is None else masters

    def is_too_long(self, view: RequestView) -> bool:
        """Return whether a decode is in time with several masters alone."""
        target = target_tpot(view, self._draft.config)
        if self.moved_seconds(view) <= PLANNED_TPOT_SHARE * target or view.num_siblings:
            return False
        return self.served_seconds(view) > PLANNED_TPOT_SHARE * target and self.are_quick([view])

    def are_quick(self, views: Sequence[RequestView]) -> bool:
        """Return whether they meet their TPOT targets together."""
        seconds = self.group_seconds(views)
        return all(seconds <= target_tpot(view, self._draft.config) for view in views)

    def are_in_time(self, views: Sequence[RequestView]) -> bool:
        """Return whether they meet their targets together, and prompts theirs after the pause for them."""
        pause = self.group_seconds(views) * max(view.num_remaining_tokens for view in views)
        end = self._draft.snapshot.now
        for prefill in self._draft.prefills:
            end += prefill.work / len(self._masters)
            if not prefill.is_late and end <= prefill.deadline < end + pause:
                return False
        return self.are_quick(views)

    def group_seconds(self, views: Sequence[RequestView]) -> float:
        """Return the seconds of a step on several instances, which read what they hold."""
        return self._step(self._masters, [view.placement for view in views])

    def served_seconds(self, view: RequestView) -> float:
        """Return the seconds of a step on the last instance, which reads KV where it is."""
        return self._step((self._last,), [view.placement])

    def moved_seconds(self, view: RequestView) -> float:
        """Return the seconds of a step on the last instance, to which all KV has moved."""
        return self._step((self._last,), [moved_to(self._last, view)])

    def _step(self, instance_ids: tuple[InstanceId, ...], placements: Sequence[Placement]) -> float:
        is_idle = not self._has_prompts
        return decode_seconds(instance_ids, placements, self._draft.cost_model, are_holders_idle=is_idle)

    @cached_property
    def _has_prompts(self) -> bool:
        """True if holders compute chunks, between which they answer."""
        snapshot = self._draft.snapshot
        is_any_computed = any(batch.plan.num_steps == 1 for batch in snapshot.batches)
        return bool(self._draft.prefills) or is_any_computed
