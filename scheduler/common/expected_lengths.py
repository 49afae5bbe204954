"""Plans for the output lengths that are expected instead of the declared maxima: KV is over-committed then.

A request counts with the length that most observed outputs of a similar maximum, and of at least its length,
did not exceed. When more requests than expected grow longer, some pause, and the last to come is preempted
once no other can go on.
"""

from dataclasses import replace

from loong.core.decision import Decision, DecisionKind
from loong.core.output_lengths import bin_of, expected_lengths, maximum_class
from loong.core.plan import IterationPlan, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.leases import arrival_order
from loong.scheduler.config import AdmissionRule, PolicyConfig
from loong.scheduler.tuning import EXPECTED_SHARE, LONG_LEASE_FACTOR

OUTGROWN = "more outputs than expected grew longer, no request could go on, and of {} with KV it came last"


def expecting(snapshot: Snapshot, lease_steps: int) -> Snapshot:
    """Return the snapshot in which each request declares the output length that is expected of it.

    That is never less than the steps of the longest lease, which a policy may plan for some instances while
    requests wait for others. So leases are as long as they are for the declared maximum.
    """
    if not snapshot.output_lengths:
        return snapshot
    least = lease_steps * LONG_LEASE_FACTOR

    def expected(view: RequestView) -> RequestView:
        counts = snapshot.output_lengths.get(maximum_class(view.max_tokens), ())
        if not (lengths := expected_lengths(counts, EXPECTED_SHARE)):
            return view
        so_far = view.num_output_tokens
        number = bin_of(so_far)
        length = lengths[number] if number < len(lengths) else 2 * so_far
        most = max(length, so_far + least)
        return view.declaring(most) if most < view.max_tokens else view

    waiting, running = tuple(map(expected, snapshot.waiting)), tuple(map(expected, snapshot.running))
    found = replace(snapshot, waiting=waiting, running=running)
    vars(found).update({name: vars(snapshot)[name] for name in _KEPT if name in vars(snapshot)})
    return found


def as_admitted(snapshot: Snapshot, config: PolicyConfig) -> Snapshot:
    """Return the snapshot with the lengths of outputs by which an operator admits requests."""
    is_strict = config.admission is AdmissionRule.STRICT
    return snapshot if is_strict else expecting(snapshot, config.lease_steps)


_KEPT = ("instance", "pools", "free")  # cached values that do not depend on lengths


def relieving(plan: IterationPlan, snapshot: Snapshot) -> IterationPlan:
    """Return the plan, which preempts the last to come if nothing else would ever happen."""
    if plan != IterationPlan(decisions=plan.decisions) or snapshot.is_anything_in_flight:
        return plan
    holders = [view for view in snapshot.running if view.is_plannable and view.placement.segments]
    if len(holders) < 2:
        return plan
    latest = max(holders, key=arrival_order)
    reason = Decision(DecisionKind.PREEMPT, (latest.request_id,), OUTGROWN.format(len(holders)))
    return replace(plan, preemptions=(Preemption(latest.request_id),), decisions=(*plan.decisions, reason))
