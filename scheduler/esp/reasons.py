"""Reasons of a plan, for the decision log.

Every plan reports what each request waits for, once for all that wait for the same thing, and which requests
are deferred. The log writes only what is new.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum

from loong.core.cost.cost_model import prefill_time
from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.placement import InstanceId
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.prompt_order import PrefillCandidate


class WaitReason(StrEnum):
    """The reason why a request does not run now. The values are words for the log."""

    NO_ROOM = "there would be too little KV for all that run, and it, to reach their last tokens"
    OVERTAKING = "an older request has waited long for room, and goes first"
    ONE_DEFERRED_AT_A_TIME = "it is deferred, and so is another, which has begun and goes first"
    NOT_CONSIDERED = "too many prompts wait: only the oldest and the newest are considered"
    DEFERRED_BY_DEADLINE = "it is deferred, as not all prompts can be in time and most can without it"
    BUSY = "the instances that are to compute it are in a step, or decode first"
    FULL_STEP = "the step of its instances is full of more urgent prompts"
    NO_SLOTS = "the instances for decodes keep their free slots for older requests, so that these can end"
    PAUSED = "free slots are kept for others, so that these can end"
    COPYING = "KV that it is to read is on its way to the instance that is to compute it"
    PAUSED_LATE = "it is late in any case, and others that can be in time have work for all instances"


JOINED = "others are to join it, or to run on its instances"
DEFERRED = frozenset(
    {
        WaitReason.DEFERRED_BY_DEADLINE,
        WaitReason.PAUSED,
        WaitReason.PAUSED_LATE,
        WaitReason.ONE_DEFERRED_AT_A_TIME,
        WaitReason.OVERTAKING,
    }
)
"""Reasons of a request that is behind others; all other reasons are about KV, instances and steps."""


def explain(draft: PlanDraft) -> PlanDraft:
    """Add the reasons for which prompts begin, are deferred or wait, and leases end early."""
    prefills = (*draft.prefills, *draft.paused_late)
    computed = [prefill for prefill in prefills if prefill.view.request_id in draft.batch_of]
    decisions = list(_reasons_to_begin(draft, computed))
    if deferred := [prefill.view.request_id for prefill in computed if prefill.is_deferred]:
        why = f"{WaitReason.DEFERRED_BY_DEADLINE}; it gets what they leave of each step"
        decisions.append(Decision(DecisionKind.DEFER, tuple(deferred), why))
    waiting: defaultdict[WaitReason, list[RequestId]] = defaultdict(list)
    for prefill in prefills:
        if prefill.view.request_id not in draft.batch_of:
            why = (
                WaitReason.PAUSED_LATE
                if prefill in draft.paused_late
                else WaitReason.DEFERRED_BY_DEADLINE
                if prefill.is_deferred
                else WaitReason.FULL_STEP
                if computed
                else WaitReason.BUSY
            )
            waiting[why].append(prefill.view.request_id)
    for why, request_ids in waiting.items():
        decisions += reason_to_wait(request_ids, why)
    ended = (draft.snapshot.batch[end.batch_id].plan for end in draft.lease_ends)
    decisions += (Decision(DecisionKind.END_LEASE, batch.request_ids, JOINED) for batch in ended)
    return replace(draft, decisions=(*draft.decisions, *decisions))


def _reasons_to_begin(draft: PlanDraft, computed: Sequence[PrefillCandidate]) -> Iterator[Decision]:
    """Yield the DoP of each prompt that begins or gets more instances, and predictions for other DoPs.

    The DoP is of the instances that compute it, which may be fewer than those of its batch. The seconds are
    those of the prompt alone.
    """
    taken = _taken(draft, computed) if computed else set()
    for prefill in computed:
        view = prefill.view
        batch = draft.batch_of[view.request_id]
        blocks = batch.blocks_of(view.request_id)
        dop = len({block.master_id for block in blocks})
        if prefill.is_begun and dop <= len(view.placement.instance_ids):
            continue
        most = draft.ordering.cluster_size
        num_taken = len(taken.difference(batch.group.instance_ids))
        costs = {
            d: prefill_time(draft.cost_model, prefill.num_tokens, prefill.num_cached, d)
            for d in sorted({1, dop, most} | {d for d in (2, 4) if d < most})
        }
        is_whole = sum(len(block.positions) for block in blocks) == prefill.num_tokens
        chosen = _instances(dop) + (f" of the batch's {batch.group.dop}" if dop < batch.group.dop else "")
        if dop == 1 and is_whole and costs[dop] > min(costs.values()):
            chosen += ", as all of it fits into one step there"
        words = {d: _instances(d) + _obstacle(draft, d, num_taken) for d in costs} | {dop: chosen}
        alternatives = tuple(Alternative(words[d], cost) for d, cost in costs.items())
        yield Decision(DecisionKind.DOP, (view.request_id,), chosen, alternatives)


def _obstacle(draft: PlanDraft, dop: int, num_taken: int) -> str:
    """Return what is against a number of instances, to follow it; empty if nothing is."""
    num_there = len(draft.everywhere)
    if dop > num_there:
        return f", {dop - num_there} of them in another part of the cluster"
    if dop > num_there - num_taken:
        return f", {dop - num_there + num_taken} of them taken"
    if dop > len(draft.prompt_ids):
        return f", {dop - len(draft.prompt_ids)} of them for decodes"
    return ""


def _taken(draft: PlanDraft, computed: Iterable[PrefillCandidate]) -> set[InstanceId]:
    """Return the instances that run something, or will run prompts: no other batch could have them."""
    batches = [running.plan for running in draft.snapshot.batches]
    batches += [draft.batch_of[prefill.view.request_id] for prefill in computed]
    return {i for batch in batches for i in batch.group.instance_ids if i in draft.view.free}


def reasons_while_busy(
    snapshot: Snapshot, waiting: Iterable[RequestView], instance_ids: Iterable[InstanceId]
) -> Iterator[Decision]:
    """Yield the reason of prompts that came since the last batch of busy instances began.

    The others keep theirs, as nothing can begin or end.
    """
    batch_ids = {snapshot.instance[i].batch_id for i in instance_ids} - {None}
    started = max((snapshot.batch[b].started_at for b in batch_ids if b is not None), default=0.0)
    last_start = min(snapshot.now, started)
    new = (view for view in waiting if view.arrival_time >= last_start and not view.has_ended)
    return reason_to_wait((view.request_id for view in new), WaitReason.BUSY)


def reason_to_wait(request_ids: Iterable[RequestId], why: WaitReason) -> Iterator[Decision]:
    """Yield why requests wait, if there are any."""
    if waiting_ids := tuple(request_ids):
        yield Decision(DecisionKind.WAIT, waiting_ids, why)


def reason_to_preempt(victim: RequestView, num_holders: int, num_free: int) -> Decision:
    """Return why a request loses its KV."""
    return Decision(
        DecisionKind.PREEMPT,
        (victim.request_id,),
        f"too few slots are free ({num_free}) for a step of those before it, and of {num_holders} requests "
        "that hold KV it came last",
    )


def _instances(dop: int) -> str:
    return "1 instance" if dop == 1 else f"{dop} instances"
