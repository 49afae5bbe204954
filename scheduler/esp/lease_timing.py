"""The time of leases while prompts wait for their ends."""

from collections.abc import Iterator, Sequence
from math import ceil, inf

from loong.core.placement import InstanceId
from loong.core.plan import LeaseEnd
from loong.core.snapshot import RunningBatch
from loong.scheduler.common.leases import lease_start_time
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.prompt_order import PrefillCandidate
from loong.scheduler.tuning import LEASE_START_SHARE, MAX_BATCHING_WAIT, MAX_PLANNING_SHARE


def least_lease_seconds(
    draft: PlanDraft,
    prefills: Sequence[PrefillCandidate],
    instance_ids: tuple[InstanceId, ...],
    num_decodes: int,
) -> float:
    """Return the least seconds of a lease once others wait for its end, while prompts are few.

    Otherwise chats that come one by one would have a step each. Most of its time would go to sending all
    decodes, and most of the engine's time to planning.
    """
    planning = draft.cost_model.host.plan_request * num_decodes / MAX_PLANNING_SHARE
    start_time = lease_start_time(instance_ids, num_decodes, draft.cost_model)
    sending = start_time / LEASE_START_SHARE - sum(prefill.work for prefill in prefills)
    seconds = max(planning, sending)
    return min(seconds, MAX_BATCHING_WAIT * min([draft.config.target_ttft, *(p.ttft for p in prefills)]))


def end_for(
    draft: PlanDraft, prefills: Sequence[PrefillCandidate], batch: RunningBatch, num_steps_due: int = 0
) -> Iterator[LeaseEnd]:
    """Yield the end of a lease for prompts, or (none) decodes, that wait for it, if it is to end early.

    It has its least time and `num_steps_due` more steps, or ends in time for the prompts.
    """
    least = least_lease_seconds(draft, prefills, batch.plan.group.instance_ids, len(batch.plan.request_ids))
    first = min((prefill.view.arrival_time for prefill in prefills), default=0.0)
    due = min((prefill.deadline - prefill.work for prefill in prefills), default=inf)
    left = min(max(first, batch.started_at) + least, due) - batch.stepped_at
    num_left = max(1, ceil(left / (batch.plan.predicted_time or 1.0)))
    step = batch.num_steps_taken + max(num_left, num_steps_due)
    if batch.can_end_early and step < batch.last_step:
        yield LeaseEnd(batch.batch_id, step)
