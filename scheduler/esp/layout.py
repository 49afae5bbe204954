"""Decodes and prompts apart, or together on all instances: by what leaves prompts more of the cluster.

Apart, the instances for decodes compute no prompts, and chunks are long. Together, no instance is spared, but
a step ends in time for its decodes' next tokens, and its overhead leaves less of it to prompts. Where KV is
short they run together, since any free slot then serves either. They come together when no prompt is being
computed, so that idle instances go on with decodes meanwhile.
"""

from collections.abc import Sequence

from loong.core.cost.work import WorkCount
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.scheduler.common.service import serves_others
from loong.scheduler.common.slo_targets import tightest_tpot
from loong.scheduler.esp.decodes import ServedDecodes
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.prompt_order import PrefillCandidate, prefill_work
from loong.scheduler.esp.step_time import longest_step, step_seconds
from loong.scheduler.tuning import PLANNED_TPOT_SHARE


def instances_for_prompts(draft: PlanDraft, decodes: ServedDecodes) -> tuple[InstanceId, ...]:
    """Choose the instances for prompts: all, together with decodes, or all but those for decodes."""
    everywhere = draft.everywhere
    if len(everywhere) < 2 or not (draft.variant.has_apart and serves_others(draft.snapshot)):
        return everywhere
    if not decodes.have_room or (draft.variant.has_proactive and _is_lone_and_short(draft)):
        return everywhere
    decode_ids = decodes.busy_ids.union(decodes.instance_ids)
    prompt_ids = tuple(i for i in everywhere if i not in decode_ids)
    if not draft.prefills:
        return prompt_ids
    first = draft.prefills[0]
    if sum(draft.view.free[i] for i in prompt_ids) < first.num_tokens:
        return everywhere  # only all instances have room for it
    if _is_prompt_in_flight(draft, decodes):
        return prompt_ids  # idle instances would wait for the others
    apart = _speed(draft, len(prompt_ids), first, longest_step(draft))
    together = together_speed(draft, first, decodes.all_views)
    is_quicker = apart >= together or _is_sooner_apart(draft, decodes, apart, together)
    return prompt_ids if is_quicker else everywhere


def _is_sooner_apart(draft: PlanDraft, decodes: ServedDecodes, apart: float, together: float) -> bool:
    """Return whether tokens come sooner apart, in seconds of all requests, with all prompts in time.

    Prompts are computed at these speeds, in seconds of work a second. Apart, the first tokens of prompts come
    later, and those of decodes sooner: together each waits for a step with chunks.
    """
    if not (draft.variant.has_light_apart and draft.is_roomy and apart):
        return False
    num_waited, work = 0.0, 0.0
    for prefill in draft.prefills:
        work += prefill.work
        num_waited += work
        if prefill.is_late or draft.snapshot.now + work / apart > prefill.deadline:
            return False
    step = PLANNED_TPOT_SHARE * tightest_tpot(decodes.all_views, draft.config)
    num_steps = work / together / step
    num_tokens = sum(min(num_steps, view.num_remaining_tokens) for view in decodes.all_views)
    return num_tokens * (step - decodes.step_seconds) > num_waited * (1 / apart - 1 / together)


def _is_lone_and_short(draft: PlanDraft) -> bool:
    """Return whether there is one request, all of whose prompt a step of all instances computes."""
    live = [view for view in draft.snapshot.request.values() if not view.has_ended]
    if len(live) > 1 or not draft.prefills:
        return False
    (prefill,), dop = draft.prefills, len(draft.everywhere)
    has_room = prefill.num_tokens <= dop * draft.config.max_num_batched_tokens
    return has_room and not prefill.is_begun and prefill.work <= dop * step_seconds(draft)


def _is_prompt_in_flight(draft: PlanDraft, decodes: ServedDecodes) -> bool:
    """Return whether some instances compute prompts, and can run nothing with others before that ends."""
    return len(decodes.leases) < len(draft.snapshot.batches)


def together_speed(draft: PlanDraft, first: PrefillCandidate, decodes: Sequence[RequestView]) -> float:
    """Return the work on the first prompt in a second of steps on all instances, with these decodes."""
    everywhere = draft.everywhere
    live = (view for view in draft.snapshot.request.values() if not view.has_ended)
    seconds = min(PLANNED_TPOT_SHARE * tightest_tpot(live, draft.config), longest_step(draft))
    if not decodes:
        return _speed(draft, len(everywhere), first, seconds)
    count = WorkCount(everywhere)
    for place, view in enumerate(decodes):
        count.add_decode(everywhere[place % len(everywhere)], view.placement)
    held = first.view.placement.tokens_by_instance()
    count.add_chunk(dict.fromkeys(everywhere, 1), held, is_ringed=False)
    begun = draft.cost_model.step_time(count.step(ESPGroup(everywhere)))
    least = draft.cost_model.prefill_terms(len(everywhere)).least
    return _speed(draft, len(everywhere), first, seconds, max(0.0, begun - least))


def _speed(draft: PlanDraft, dop: int, first: PrefillCandidate, seconds: float, taken: float = 0.0) -> float:
    """Return the work in a second of steps of `seconds`, of which decodes take some.

    The unit of work is a second of one instance.
    """
    num_tokens = draft.cost_model.prefill_terms(dop).max_tokens(seconds - taken, first.num_cached)
    return prefill_work(num_tokens, first.num_cached, draft.cost_model.prefill_terms(1)) / seconds
