"""The part of a refused plan that keeps the rules."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from loong.core.check_plan import check_plan
from loong.core.errors import InvalidPlanError
from loong.core.plan import BatchPlan, Borrowing, IterationPlan
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class PermittedPart:
    """The part of a plan that keeps the rules, and the requests that occur only in the refused parts."""

    plan: IterationPlan
    refused_ids: frozenset[RequestId]


def permitted_part(snapshot: Snapshot, plan: IterationPlan) -> PermittedPart:
    """Return the parts of `plan` that keep the rules together, tried one by one in a fixed order.

    Parts that free KV come first, so that batches which need those slots are kept. A batch that breaks a rule
    is reduced to the requests that keep the rules. Decisions are left out: they explain the whole plan.
    """
    permitted = IterationPlan(borrowings=_permitted_borrowings(snapshot, plan))
    kept_ids, refused_ids = set[RequestId](), set[RequestId]()
    for part, request_ids in _parts(plan):
        candidate = _together(permitted, part)
        if _keeps_rules(snapshot, candidate):
            permitted = candidate
            kept_ids.update(request_ids)
        else:
            refused_ids.update(request_ids)
    for batch in plan.batches:
        kept = _permitted_batch(snapshot, permitted, batch)
        if kept is not None:
            permitted = replace(permitted, batches=(*permitted.batches, kept))
            kept_ids.update(kept.request_ids)
        refused_ids.update(batch.request_ids)
    return PermittedPart(permitted, frozenset(refused_ids - kept_ids))


def _permitted_borrowings(snapshot: Snapshot, plan: IterationPlan) -> tuple[Borrowing, ...]:
    """Return the borrowings that keep the rules; they have no effect without a batch of their requests."""
    permitted: tuple[Borrowing, ...] = ()
    for borrowing in plan.borrowings:
        if _keeps_rules(snapshot, IterationPlan(borrowings=(*permitted, borrowing))):
            permitted = (*permitted, borrowing)
    return permitted


def _permitted_batch(snapshot: Snapshot, permitted: IterationPlan, batch: BatchPlan) -> BatchPlan | None:
    """Return the requests of a batch that keep the rules together with `permitted`, or None if none do."""

    def is_permitted(part: BatchPlan) -> bool:
        return _keeps_rules(snapshot, replace(permitted, batches=(*permitted.batches, part)))

    kept: list[RequestId] = []

    def keep(request_ids: Sequence[RequestId]) -> None:
        """Keep the permitted ones of these requests by bisection: a check takes time in proportion to the
        batch.
        """
        if is_permitted(batch.only_for((*kept, *request_ids))):
            kept.extend(request_ids)
        elif len(request_ids) > 1:
            middle = len(request_ids) // 2
            keep(request_ids[:middle])
            keep(request_ids[middle:])

    keep(batch.request_ids)
    return batch.only_for(kept) if kept else None


def _keeps_rules(snapshot: Snapshot, plan: IterationPlan) -> bool:
    try:
        check_plan(snapshot, plan)
    except InvalidPlanError:
        return False
    return True


def _parts(plan: IterationPlan) -> Iterator[tuple[IterationPlan, tuple[RequestId, ...]]]:
    """Yield a plan of each part except batches, and the requests that the part concerns."""
    for failure in plan.failures:
        yield IterationPlan(failures=(failure,)), (failure.request_id,)
    for preemption in plan.preemptions:
        yield IterationPlan(preemptions=(preemption,)), (preemption.request_id,)
    for eviction in plan.evictions:
        yield IterationPlan(evictions=(eviction,)), (eviction.segment.owner_id,)
    for migration in plan.migrations:
        yield IterationPlan(migrations=(migration,)), (migration.segment.owner_id,)
    for extension in plan.lease_extensions:
        yield IterationPlan(lease_extensions=(extension,)), ()
    for end in plan.lease_ends:
        yield IterationPlan(lease_ends=(end,)), ()


def _together(one: IterationPlan, other: IterationPlan) -> IterationPlan:
    return IterationPlan(
        migrations=one.migrations + other.migrations,
        preemptions=one.preemptions + other.preemptions,
        lease_ends=one.lease_ends + other.lease_ends,
        failures=one.failures + other.failures,
        lease_extensions=one.lease_extensions + other.lease_extensions,
        evictions=one.evictions + other.evictions,
        borrowings=one.borrowings + other.borrowings,
    )
