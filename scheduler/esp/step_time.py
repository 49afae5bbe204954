"""The longest time of a step of prompts, by who would wait for its end.

- Decodes on the same instances: their TPOT targets bound it (`batching.py`).
- A prompt that comes when the step has just begun: it needs a step of its own before its target. A step is
  short enough for that, and no longer than is efficient.
- Nobody, where there is only one request: a step is as long as is efficient. One that comes meanwhile waits
  for a step that is mostly work: shorter ones help little on a machine where steps cost so much. On
  processors, a prompt that one step has room for is not cut at all.

In any case a step does at least as much work as it costs to begin one.
"""

from math import inf

from loong.scheduler.common.service import serves_all
from loong.scheduler.common.slo_targets import default_ttft
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.prompt_order import PrefillCandidate
from loong.scheduler.esp.step_builder import StepBuilder
from loong.scheduler.tuning import (
    MAX_LONE_SECONDS,
    MAX_OVERHEAD_SHARE,
    MAX_READING_SHARE,
    MAX_STEP_SECONDS,
    MAX_STEP_SHARE,
    MIN_OVERHEAD_SHARE,
    PLANNED_TTFT_SHARE,
)


def step_seconds(draft: PlanDraft) -> float:
    """Return the seconds that a step without decodes may take, before `worthwhile_seconds`.

    Long steps are more efficient, which counts while long prompts wait for each other. The bound of an
    operator holds in any case.
    """
    longest, usual = longest_step(draft), draft.config.step_time
    num_long = sum(prefill.work > usual * draft.view.num_instances for prefill in draft.prefills)
    seconds = longest if num_long > 1 else max(usual, longest / 2)
    return seconds if draft.config.max_step_time is not None else max(seconds, _efficient_seconds(draft))


def _efficient_seconds(draft: PlanDraft) -> float:
    """Return the time of a step that is mostly work.

    If there are other requests, others may come soon: then a short prompt that has just missed the step has
    time for one of its own, and as much again.
    """
    terms = draft.cost_model.prefill_terms(len(draft.prompt_ids or draft.everywhere))
    # Launches that overlap with work count once, as longer steps hide them.
    seconds = max(terms.least, (terms.overhead + terms.floor) / MIN_OVERHEAD_SHARE)
    live = [view for view in draft.snapshot.request.values() if not view.has_ended]
    if len(live) == 1:
        has_room = live[0].num_uncomputed_tokens <= draft.config.max_num_batched_tokens
        return MAX_LONE_SECONDS if has_room and serves_all(draft.snapshot) else seconds
    ttft = default_ttft(1, draft.ordering.widest, draft.config)
    return min(seconds, PLANNED_TTFT_SHARE * ttft - 2 * terms.least)


def longest_step(draft: PlanDraft) -> float:
    """Return the most seconds of a step without decodes, as long as beginning a step costs much less.

    A prompt may come when the step has just begun, and then needs a step of its own before its target.
    """
    config = draft.config
    if config.max_step_time is not None:
        return config.max_step_time
    live = (view for view in draft.snapshot.request.values() if not view.has_ended)
    least = min(map(draft.ordering.targets.of, live), default=inf)
    return min(MAX_STEP_SECONDS, MAX_STEP_SHARE * min(least, config.target_ttft))


def worthwhile_seconds(
    step: StepBuilder, prefill: PrefillCandidate, seconds: float, config: PolicyConfig
) -> float:
    """Return `seconds` of a step without decodes, or more, so that a prompt's chunk outweighs the overhead.

    The overhead is that of the step itself, and what the step has already if that takes longer. Reading a
    long history may take the step up to half the TTFT target.
    """
    spent = step.begun_seconds
    overhead = max(step.sizer.least_seconds(prefill.view), spent if spent > seconds else 0.0)
    reading = min(step.reading_seconds(prefill.view) / MAX_READING_SHARE, config.target_ttft / 2)
    return max(seconds, reading, overhead / MAX_OVERHEAD_SHARE)
