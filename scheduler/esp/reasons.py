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
from loong.core.plan import BatchPlan, KVMigration
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import RunningBatch
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.esp.admission import AdmissionDecision, PrefillCandidate, Refusal
from loong.scheduler.esp.group import Group

DEFERRED_BY_DEADLINE = "it is deferred, as not all prompts can be in time and most can without it"
NO_PLACE = "too little KV is free on the instances that it could have now"
PAUSED = "free slots are kept for others, so that these can end"
PAUSED_DEFERRED = (
    "others that can be in time fill its instances, which need not wait for each other meanwhile"
)
DEFERRED = frozenset(
    {
        DEFERRED_BY_DEADLINE,
        PAUSED,
        PAUSED_DEFERRED,
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
        dops = sorted(
            {1, dop, planning_view.num_instances} | {d for d in (2, 4) if d < planning_view.num_instances}
        )
        num_open = planning_view.num_instances - len(taken.difference(batch.group.instance_ids))
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
    admission: AdmissionDecision, groups: Sequence[Group], batch_of: BatchOf
) -> Iterator[Decision]:
    """Yield the reason of each prompt that waits."""
    waiting: defaultdict[str, list[RequestId]] = defaultdict(list)
    for refusal, refused in admission.refused.items():
        waiting[refusal.value] += [view.request_id for view in refused]
    place_of = {prefill.view.request_id: i for i, group in enumerate(groups) for prefill in group.prefills}
    reasons: dict[int, str] = {}  # of groups, by index: many prompts may wait for one
    for prefill in admission.prefills:
        request_id = prefill.view.request_id
        if request_id in batch_of:
            continue
        if (place := place_of.get(request_id)) is None:
            waiting[NO_PLACE].append(request_id)
        elif prefill.is_deferred:
            waiting[DEFERRED_BY_DEADLINE].append(request_id)
        else:
            if place not in reasons:
                reasons[place] = _wait_of(groups[place], batch_of)
            waiting[reasons[place]].append(request_id)
    for reason, request_ids in waiting.items():
        yield Decision(DecisionKind.WAIT, tuple(request_ids), reason)


def reasons_to_defer(prefills: Iterable[PrefillCandidate]) -> Iterator[Decision]:
    """Yield decisions for the deferred prompts that run all the same."""
    if request_ids := tuple(prefill.view.request_id for prefill in prefills if prefill.is_deferred):
        yield Decision(
            DecisionKind.DEFER,
            request_ids,
            f"{DEFERRED_BY_DEADLINE}; it gets what they leave of each step",
        )


def _wait_of(group: Group, batch_of: BatchOf) -> str:
    """Return what the prompts of a group wait for that are not deferred."""
    if not group.is_ready:
        instance_ids = group.instance_ids
        if len(instance_ids) == 1:
            return f"it is to run on instance {instance_ids[0]} once that is free"
        return f"it is to run on instances {', '.join(map(str, instance_ids))} once all are free"
    if any(p.view.request_id in batch_of for p in group.prefills):
        return "the step of its instances is full of more urgent prompts"
    return "its instances decode first, until more prompts have come or slots are free"


def reasons_while_busy(planning_view: PlanningView) -> Iterator[Decision]:
    """Yield the reason of prompts that came since the last batch began, while nothing can begin."""
    snapshot = planning_view.snapshot
    last_start = min(snapshot.now, max((batch.started_at for batch in snapshot.batches), default=0.0))
    if new := tuple(view.request_id for view in planning_view.waiting if view.arrival_time >= last_start):
        yield Decision(DecisionKind.WAIT, new, "no instance is free before the end of its step")


def reason_to_pause(request_ids: Set[RequestId]) -> Decision:
    """Return why requests not in flight pause, though instances are free."""
    return Decision(DecisionKind.WAIT, tuple(sorted(request_ids)), PAUSED)


def reason_to_pause_deferred(request_ids: Set[RequestId]) -> Decision:
    """Return why deferred prompts are paused."""
    return Decision(DecisionKind.WAIT, tuple(sorted(request_ids)), PAUSED_DEFERRED)


def reason_to_preempt(victim: RequestView, num_holders: int, num_free: int) -> Decision:
    """Return why a request loses its KV."""
    return Decision(
        DecisionKind.PREEMPT,
        (victim.request_id,),
        f"too few slots are free ({num_free}) for a step of those before it, and of {num_holders} requests "
        "that hold KV it came last",
    )


def reason_to_consolidate(move: KVMigration) -> Decision:
    """Return why KV of a request moves."""
    return Decision(
        DecisionKind.MIGRATE,
        (move.segment.owner_id,),
        f"all of its KV on instance {move.destination_id}, to decode there alone",
    )


def reason_to_end_lease(lease: RunningBatch, reason: str) -> Decision:
    """Return why the requests of a lease pause soon."""
    return Decision(DecisionKind.END_LEASE, lease.plan.request_ids, reason)


def _instances(dop: int) -> str:
    return "1 instance" if dop == 1 else f"{dop} instances"
