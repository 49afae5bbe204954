"""The isolation of requests at which instances were lost in a row, under any policy.

A batch that ends an instance does so because of one of its requests, or of none. So a request that may be the
one computes apart: nothing else is in flight then. If that ends an instance again, the request fails, and no
other fails with it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from loong.core.decision import Decision, DecisionKind
from loong.core.plan import BatchPlan, Failure, FailureCause, IterationPlan
from loong.core.positions import intersection
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.leases import lease_ends
from loong.scheduler.tuning import MAX_LOSSES, MAX_OTHER_LOSSES

APART = "a request at which instances were lost in a row is computed with nothing else in flight"


def guilty(views: Iterable[RequestView]) -> Iterator[Failure]:
    """Yield the failures of the requests at which too many instances were lost in a row.

    Where other instances are lost as well, a row may be chance, and has to be longer.
    """
    for view in views:
        if view.num_losses >= MAX_LOSSES + min(view.num_other_losses, MAX_OTHER_LOSSES):
            yield Failure(view.request_id, _reason(view), FailureCause.LOSSES)


def isolating(plan: IterationPlan, snapshot: Snapshot) -> IterationPlan:
    """Return the plan with batches of suspects apart: each alone, for one step, with nothing else in flight.

    A suspect is a request that fails with the next loss in a row. Until its positions in question can be
    computed apart, no batch begins and leases end early.
    """
    if not snapshot.stats.num_losses:
        return plan
    in_flight = (*snapshot.batches, *snapshot.ending)
    if any(_suspect_of(batch.plan, snapshot) for batch in in_flight):
        return _waiting(plan, snapshot)
    for batch in plan.batches:
        if (suspect := _suspect_of(batch, snapshot)) is not None:
            return _waiting(plan, snapshot) if in_flight else _apart(plan, batch, suspect)
    return plan


def _suspect_of(batch: BatchPlan, snapshot: Snapshot) -> RequestView | None:
    """Return the first request of a batch that computes positions at which instances were lost before."""
    for request_id in batch.request_ids:
        view = snapshot.request.get(request_id)
        if view is not None and view.num_losses >= MAX_LOSSES - 1 and _computes(batch, view):
            return view
    return None


def _computes(batch: BatchPlan, view: RequestView) -> bool:
    ranges = (block.positions for block in batch.blocks_of(view.request_id))
    return any(intersection(range(p[0], p[-1] + batch.num_steps), view.suspected) for p in ranges)


def _waiting(plan: IterationPlan, snapshot: Snapshot) -> IterationPlan:
    """Return the plan without anything new, and with the ends of all leases."""
    held_ids = [request_id for batch in plan.batches for request_id in batch.request_ids]
    return IterationPlan(lease_ends=lease_ends(snapshot.batches), decisions=_decisions(plan, held_ids))


def _apart(plan: IterationPlan, batch: BatchPlan, suspect: RequestView) -> IterationPlan:
    """Return the plan with one batch, of one step of one request."""
    request_id = suspect.request_id
    alone = batch.only_for((request_id,))
    if alone.num_steps > 1:
        alone = replace(alone.at_step(0, (request_id,)), predicted_time=batch.predicted_time)
    held_ids = [i for other in plan.batches for i in other.request_ids if i != request_id]
    return replace(plan, batches=(alone,), lease_extensions=(), decisions=_decisions(plan, held_ids))


def _decisions(plan: IterationPlan, held_ids: Sequence[RequestId]) -> tuple[Decision, ...]:
    """Return the decisions about other requests than those that are held, and why these wait."""
    others = [decision for decision in plan.decisions if set(decision.request_ids).isdisjoint(held_ids)]
    return (*others, Decision(DecisionKind.WAIT, tuple(held_ids), APART)) if held_ids else tuple(others)


def _reason(view: RequestView) -> str:
    first, last = view.suspected[0], view.suspected[-1]
    where = f"position {first}" if first == last else f"positions {first} to {last}"
    request = f"request {view.request_id}, each at {where}"
    return f"{view.num_losses} instances were lost while they computed {request}"
