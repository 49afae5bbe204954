"""Requests that need more KV than one can have on the present instances: they fail, wait, or begin anew."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from loong.core.decision import Decision, DecisionKind
from loong.core.placement import InstanceId
from loong.core.plan import Failure, FailureCause, IterationPlan, Preemption, PreemptionReason
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.borrowed_kv import borrowed_at
from loong.scheduler.common.suspects import guilty

Pools: TypeAlias = Mapping[InstanceId, int]
LimitOf: TypeAlias = Callable[[Pools, Pools], int]
"""Returns the most KV of one request, by the slots of full instances and of memory instances."""

WITHOUT_LOAN = "it needs KV for {} tokens, which only a loan has room for, and others need its slots"


def fail_stranded(snapshot: Snapshot, limit_of: LimitOf, max_loan: int) -> IterationPlan | None:
    """Return failures of the requests not in flight that can never go on, or None.

    They need more KV than one can have now and with a loan of `max_loan`, or too many instances were lost at
    them. While no instance is left, they wait for one, as all others do.
    """
    pools = _own_pools(snapshot)
    if not pools:
        return None
    limit = limit_of(pools, {**snapshot.memory_pools, **snapshot.returning_memory})
    if max_loan:
        limit = max(limit, limit_of(pools, {}) + max_loan)
    left = f"{len(pools)} instances that are left" if len(pools) > 1 else "instance that is left"
    failures = [*guilty(_resting(snapshot))] if snapshot.stats.num_losses else []
    if snapshot.most_tokens > limit:
        guilty_ids = {failure.request_id for failure in failures}
        failures += [
            Failure(
                view.request_id,
                f"it needs KV for {view.num_final_tokens} tokens, but can have that of {limit} on the {left}",
                FailureCause.NO_ROOM,
            )
            for view in _resting(snapshot)
            if view.num_final_tokens > limit and view.request_id not in guilty_ids
        ]
    if not failures:
        return None
    return IterationPlan(
        failures=tuple(failures),
        decisions=tuple(Decision(DecisionKind.FAIL, (f.request_id,), f.reason) for f in failures),
    )


def preempt_oversized(snapshot: Snapshot, limit_of: LimitOf) -> IterationPlan | None:
    """Return preemptions of requests not in flight that need a loan which is over, or None.

    They keep their KV while there is no other request, or an instance returns that has room for them.
    """
    limit = limit_of(_own_pools(snapshot), {**snapshot.memory_pools, **snapshot.returning_memory})
    if snapshot.most_tokens <= limit or not snapshot.pools:
        return None
    found = [v for v in _resting(snapshot) if v.num_final_tokens > limit and v.placement.segments]
    if not found or len(found) == len(snapshot.request):
        return None
    return IterationPlan(
        preemptions=tuple(Preemption(v.request_id, PreemptionReason.TOO_LONG) for v in found),
        decisions=tuple(
            Decision(DecisionKind.PREEMPT, (v.request_id,), WITHOUT_LOAN.format(v.num_final_tokens))
            for v in found
        ),
    )


def without_oversized(snapshot: Snapshot, limit_of: LimitOf, max_loan: int) -> Snapshot:
    """Hide the requests not in flight that need room which is not there now, and their slots.

    It is that of instances that are being started again, or lent to other engines, or a loan of `max_loan`.
    """
    is_any_missing = snapshot.returning or snapshot.returning_memory or snapshot.lent or max_loan
    if not is_any_missing or not snapshot.pools:
        return snapshot
    limit = limit_of(snapshot.pools, snapshot.memory_pools)
    if snapshot.most_tokens <= limit:
        return snapshot
    hidden = {v.request_id: v for v in _resting(snapshot) if v.num_final_tokens > limit}
    held: Counter[InstanceId] = Counter()
    for view in hidden.values():
        held.update(view.own_tokens_by_instance())
    for (_, instance_id), num_tokens in dict(chain.from_iterable(map(borrowed_at, hidden.values()))).items():
        held[instance_id] += num_tokens
    return replace(
        snapshot,
        instances=tuple(
            replace(
                i, kv_capacity=i.kv_capacity - held[i.instance_id], kv_used=i.kv_used - held[i.instance_id]
            )
            for i in snapshot.instances
        ),
        waiting=tuple(view for view in snapshot.waiting if view.request_id not in hidden),
        running=tuple(view for view in snapshot.running if view.request_id not in hidden),
    )


def _own_pools(snapshot: Snapshot) -> Pools:
    """Return the slots of full instances with those that are to return."""
    return {i: n + snapshot.lent.get(i, 0) for i, n in snapshot.pools.items()} | dict(snapshot.returning)


def _resting(snapshot: Snapshot) -> Iterator[RequestView]:
    return (view for view in (*snapshot.waiting, *snapshot.running) if view.is_plannable)
