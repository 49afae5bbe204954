"""The share of late prompts, and the choice of those that pause while others have enough work.

A long prompt that is late in any case takes time from every step. So it pauses, with its KV, until prompts
that can be in time leave time for it.
"""

from collections.abc import Set
from dataclasses import replace

from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.prompt_order import PrefillCandidate, prefill_work
from loong.scheduler.tuning import LONG_PROMPT_STEPS, MIN_ON_TIME_SHARE


def pause_late(draft: PlanDraft) -> PlanDraft:
    """Pause late prompts that take much time, while others have enough work."""
    late = _pausing(draft)
    if not late:
        return draft
    return replace(
        draft,
        prefills=tuple(prefill for prefill in draft.prefills if prefill not in late),
        paused_late=tuple(prefill for prefill in draft.prefills if prefill in late),
    )


def is_share_due(prefill: PrefillCandidate, dop: int, draft: PlanDraft) -> bool:
    """Return whether `deferred_share` of the prompt's age covers twice the time already spent on it."""
    done = prefill_work(prefill.num_cached, 0, draft.cost_model.prefill_terms(1)) / dop
    age, share = draft.snapshot.now - prefill.view.arrival_time, draft.config.deferred_share
    return share > 0 and share * age >= 2 * done


def _pausing(draft: PlanDraft) -> Set[PrefillCandidate]:
    """Return the prompts to pause: deferred or past their target, and long or on several instances.

    The oldest one is left out when its share of the time is due. None is paused if the prompts that can be in
    time are little work.
    """
    step_time = draft.config.step_time
    late = [prefill for prefill in draft.prefills if prefill.is_late]
    long = {p for p in late if p.dop > 1 or p.work > LONG_PROMPT_STEPS * step_time}
    on_time = sum(prefill.work for prefill in draft.prefills if not prefill.is_late)
    if not long or on_time < MIN_ON_TIME_SHARE * draft.view.num_instances * step_time:
        return set()
    oldest = min(late, key=lambda prefill: prefill.view.arrival_time)
    return long.difference([oldest] if is_share_due(oldest, oldest.dop, draft) else [])
