"""The check of a plan by the rules of the cluster. A plan that breaks one is a bug of its policy."""

from loong.core.errors import InvalidPlanError
from loong.core.plan import IterationPlan
from loong.core.rules.batch_rules import (
    check_groups_are_idle,
    check_holders,
    check_leases,
    check_queries,
    check_ranges,
    check_requests_are_at_rest,
    check_tp_sizes,
    check_writes,
)
from loong.core.rules.borrowing_rules import check_borrowings
from loong.core.rules.case import Case
from loong.core.rules.change_rules import (
    check_evictions,
    check_lease_ends,
    check_lease_extensions,
    check_migrations,
    check_preemptions,
    check_room,
    check_window_room,
)
from loong.core.rules.copy_rules import check_copies, check_owner_evictions
from loong.core.snapshot import Snapshot

RULES = (
    check_ranges,
    check_groups_are_idle,
    check_tp_sizes,
    check_requests_are_at_rest,
    check_queries,
    check_leases,
    check_writes,
    check_holders,
    check_migrations,
    check_copies,
    check_preemptions,
    check_evictions,
    check_owner_evictions,
    check_lease_ends,
    check_lease_extensions,
    check_room,
    check_window_room,
)


def check_plan(snapshot: Snapshot, plan: IterationPlan) -> None:
    """Raise `InvalidPlanError`, naming the thing and both numbers, at the first rule that `plan` breaks."""
    check_borrowings(snapshot, plan)
    case = Case(snapshot.after(plan), plan, snapshot.read_tokens_to_borrow(plan))
    for rule in RULES:
        try:
            rule(case)
        except LookupError as error:
            raise InvalidPlanError(f"the plan names what does not exist: {error!r}") from error
