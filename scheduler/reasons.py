"""Why a plan is as it is, for the decision log: said once a request, when something is decided for it."""

from collections.abc import Iterable, Iterator, Set

from loong.core.cost_model import CostModel, prefill_time
from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.plan import BatchPlan
from loong.core.request import RequestId, RequestView
from loong.scheduler.allocation import Group
from loong.scheduler.dispatch import Dispatched, Refusal, Room
from loong.scheduler.survey import Survey


def reasons_to_begin(
    group: Group, batch: BatchPlan, cost_model: CostModel, survey: Survey
) -> Iterator[Decision]:
    """For each prompt that begins with `batch`: its DoP, and the seconds that others would have taken."""
    begun = set(batch.request_ids)
    for prefill in group.prefills:
        if prefill.is_begun or prefill.view.request_id not in begun:
            continue
        dop = len({block.master_id for block in batch.blocks_of(prefill.view.request_id)})
        dops = sorted({1, dop, survey.num_instances} | {d for d in (2, 4) if d < survey.num_instances})
        costs = (prefill_time(cost_model, prefill.num_tokens, 0, d) for d in dops)
        yield Decision(
            DecisionKind.DOP,
            (prefill.view.request_id,),
            _instances(dop),
            tuple(Alternative(_instances(d), cost) for d, cost in zip(dops, costs, strict=True)),
        )


def reasons_to_wait(
    survey: Survey, dispatched: Dispatched, groups: Iterable[Group], begun_ids: Set[RequestId]
) -> Iterator[Decision]:
    """For each prompt that has come just now, if it is not among those begun: what it waits for."""
    now = survey.snapshot.now
    new = {view.request_id: view for view in survey.waiting if view.arrival_time == now}
    if not new:
        return
    refusal_of = {view.request_id: refusal for view, refusal in dispatched.refused}
    group_of = {prefill.view.request_id: group for group in groups for prefill in group.prefills}
    for prefill in dispatched.prefills:
        if prefill.is_late and prefill.view.request_id in new:
            yield Decision(
                DecisionKind.DISPATCH,
                (prefill.view.request_id,),
                f"it is put off: its {prefill.work:.3f} instance-seconds would make others late",
            )
    for request_id in (i for i in new if i not in begun_ids):
        if request_id in refusal_of:
            reason = _refusal(new[request_id], refusal_of[request_id], dispatched.room)
        elif request_id in group_of:
            reason = _wait_for(group_of[request_id])
        else:
            reason = "it waits for room: no instances that it could have now have enough"
        yield Decision(DecisionKind.WAIT, (request_id,), reason)


def _refusal(view: RequestView, refusal: Refusal, room: Room) -> str:
    reason: str = refusal.value
    if refusal is Refusal.NO_ROOM:
        reason += f": {room.peak_with(view)} slots, of which there are {room.capacity}"
    return reason


def _wait_for(group: Group) -> str:
    if group.is_ready:
        return "it waits for the next step: this one is full, or others are to begin with it"
    ids = ", ".join(str(i) for unit in group.units for i in unit.instance_ids)
    return f"it waits for instances {ids}; the last of them is free in {group.available_in:.3f} s"


def reasons_to_preempt(
    victim: RequestView, holders: Iterable[RequestView], num_free: int
) -> Iterator[Decision]:
    """Why a request loses its KV."""
    yield Decision(
        DecisionKind.PREEMPT,
        (victim.request_id,),
        f"{num_free} slots are free, too few for a step of those before it; it came last",
        tuple(Alternative(f"preempt {v.request_id}", float(v.num_computed_tokens)) for v in holders),
    )


def _instances(dop: int) -> str:
    return "1 instance" if dop == 1 else f"{dop} instances"
