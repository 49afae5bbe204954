"""Reasons of a plan, for the decision log.

Every plan reports what each request waits for, once for all that wait for the same thing, and which requests
are deferred. The log writes only what is new.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel, prefill_time
from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.esp.admission import PrefillCandidate, Refusal

DEFERRED_BY_DEADLINE = "it is deferred, as not all prompts can be in time and most can without it"
BUSY = "the instances that are to compute it are in a step, or decode first"
FULL_STEP = "the step of its instances is full of more urgent prompts"
PAUSED = "free slots are kept for others, so that these can end"
PAUSED_LATE = "it is late in any case, and others that can be in time have work for all instances"
DEFERRED = frozenset(
    {
        DEFERRED_BY_DEADLINE,
        PAUSED,
        PAUSED_LATE,
        Refusal.ONE_DEFERRED_AT_A_TIME.value,
        Refusal.OVERTAKING.value,
    }
)
"""Reasons of a request that is behind others; all other reasons are about KV, instances and steps."""

BatchOf: TypeAlias = Mapping[RequestId, BatchPlan]
"""The batches of a plan by each of their requests."""


def reasons_to_begin(
    prefills: Sequence[PrefillCandidate],
    batch_of: BatchOf,
    cost_model: CostModel,
    planning_view: PlanningView,
) -> Iterator[Decision]:
    """Yield the DoP of each prompt that begins or gets more instances, and predictions for other DoPs.

    The seconds are those of the prompt alone.
    """
    taken = _taken(prefills, batch_of, planning_view) if prefills else set()
    for prefill in prefills:
        view = prefill.view
        batch = batch_of[view.request_id]
        dop = len({block.master_id for block in batch.blocks_of(view.request_id)})
        if prefill.is_begun and dop <= len(view.placement.instance_ids):
            continue
        most = planning_view.cluster_size
        dops = sorted({1, dop, most} | {d for d in (2, 4) if d < most})
        num_open = most - len(taken.difference(batch.group.instance_ids))
        yield Decision(
            DecisionKind.DOP,
            (view.request_id,),
            _instances(dop),
            tuple(
                Alternative(
                    _instances(d) + (f", {d - num_open} of them taken" if d > num_open else ""),
                    prefill_time(cost_model, prefill.num_tokens, prefill.num_cached, d),
                )
                for d in dops
            ),
        )


def _taken(
    prefills: Iterable[PrefillCandidate], batch_of: BatchOf, planning_view: PlanningView
) -> set[InstanceId]:
    """Return the instances that run something, or will run prompts: no other batch could have them."""
    batches = [running.plan for running in planning_view.snapshot.batches]
    batches += [batch_of[prefill.view.request_id] for prefill in prefills]
    return {i for batch in batches for i in batch.group.instance_ids if i in planning_view.free}


def reasons_to_wait(
    prefills: Iterable[PrefillCandidate],
    refused: Mapping[Refusal, Sequence[RequestView]],
    batch_of: BatchOf,
) -> Iterator[Decision]:
    """Yield the reason of each prompt that waits, admitted or refused."""
    waiting: defaultdict[str, list[RequestId]] = defaultdict(list)
    for refusal, views in refused.items():
        waiting[refusal.value] += [view.request_id for view in views]
    is_any_computed = any(prefill.view.request_id in batch_of for prefill in prefills)
    for prefill in prefills:
        if prefill.view.request_id not in batch_of:
            usual = FULL_STEP if is_any_computed else BUSY
            reason = DEFERRED_BY_DEADLINE if prefill.is_deferred else usual
            waiting[reason].append(prefill.view.request_id)
    for reason, request_ids in waiting.items():
        yield Decision(DecisionKind.WAIT, tuple(request_ids), reason)


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
    if request_ids := tuple(view.request_id for view in new):
        yield Decision(DecisionKind.WAIT, request_ids, BUSY)


def reasons_to_defer(prefills: Iterable[PrefillCandidate]) -> Iterator[Decision]:
    """Yield decisions for the deferred prompts that run all the same."""
    if request_ids := tuple(prefill.view.request_id for prefill in prefills if prefill.is_deferred):
        yield Decision(
            DecisionKind.DEFER,
            request_ids,
            f"{DEFERRED_BY_DEADLINE}; it gets what they leave of each step",
        )


def reason_to_pause(request_ids: Set[RequestId]) -> Decision:
    """Return why requests not in flight pause, though instances are free."""
    return Decision(DecisionKind.WAIT, tuple(sorted(request_ids)), PAUSED)


def reason_to_pause_late(request_ids: Iterable[RequestId]) -> Decision:
    """Return why late prompts pause."""
    return Decision(DecisionKind.WAIT, tuple(sorted(request_ids)), PAUSED_LATE)


def reason_to_preempt(victim: RequestView, num_holders: int, num_free: int) -> Decision:
    """Return why a request loses its KV."""
    return Decision(
        DecisionKind.PREEMPT,
        (victim.request_id,),
        f"too few slots are free ({num_free}) for a step of those before it, and of {num_holders} requests "
        "that hold KV it came last",
    )


def reason_to_end_lease(lease: RunningBatch, reason: str) -> Decision:
    """Return why the requests of a lease pause soon."""
    return Decision(DecisionKind.END_LEASE, lease.plan.request_ids, reason)


def _instances(dop: int) -> str:
    return "1 instance" if dop == 1 else f"{dop} instances"
