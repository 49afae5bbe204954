"""A run in which one request meets with all that a policy can do to it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from decision_logs import logged
from plans import decode, move, prefill
from simulation import instances_with, timed_request

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import step_work
from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.plan import BatchPlan, IterationPlan, Preemption
from loong.core.request import SLO, RequestView
from loong.core.snapshot import Snapshot
from loong.observability.decision_log.lines import Line

SHORT, LONG, LATE = "r000", "r001", "r002"
CHUNK, LEASE = 200, 8


def eventful_run(path: Path) -> tuple[Line, ...]:
    """Return the log of a run of three requests on three instances; `LONG` is the one to watch."""
    requests = [
        timed_request(0, 90, 20),
        replace(timed_request(1, 600, 30, arrival_time=0.02), slo=SLO(0.4, 0.02)),
        timed_request(2, 50, 4, arrival_time=0.03),
    ]
    return logged(path, _Director(), instances_with([700, 700, 700]), requests)


@dataclass
class _Director:
    """A policy with a script."""

    has_preempted: bool = False

    def __call__(self, snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        plans = [self._plan(view, snapshot) for view in snapshot.request.values() if view.is_plannable]
        batches, idle = [], {i.instance_id for i in snapshot.instances if i.is_idle}
        for batch in (batch for plan in plans for batch in plan.batches):
            if idle.issuperset(batch.group.instance_ids):
                idle.difference_update(batch.group.instance_ids)
                batches.append(_predicted(batch, snapshot, cost_model))
        named = {request_id for batch in batches for request_id in batch.request_ids}
        decisions = [d for plan in plans for d in plan.decisions]
        return IterationPlan(
            tuple(batches),
            tuple(m for plan in plans for m in plan.migrations),
            tuple(p for plan in plans for p in plan.preemptions),
            decisions=tuple(
                d for d in decisions if d.kind is not DecisionKind.DOP or named.issuperset(d.request_ids)
            ),
        )

    def _plan(self, view: RequestView, snapshot: Snapshot) -> IterationPlan:
        if view.request_id == SHORT:
            return _alone(view, (0, 1, 2), home=2)
        if view.request_id == LATE:
            return _alone(view, (2,), home=2)
        return self._plan_long(view)

    def _plan_long(self, view: RequestView) -> IterationPlan:
        if not view.is_decoding:
            return _prefill_long(view)
        if view.num_output_tokens <= LEASE:
            return IterationPlan((decode([view], (0, 1), {LONG: 0}, num_steps=LEASE),))
        if 1 in view.placement.instance_ids and not self.has_preempted:
            why = Decision(DecisionKind.MIGRATE, (LONG,), "all KV on instance 0, so that 1 is free")
            return IterationPlan(migrations=move(view, 1, 0), decisions=(why,))
        if view.num_output_tokens > 2 * LEASE and not self.has_preempted:
            self.has_preempted = True
            return IterationPlan(preemptions=(Preemption(LONG),))
        home = view.placement.instance_ids[0]
        return IterationPlan((decode([view], (home,), {LONG: home}, num_steps=LEASE),))


def _alone(view: RequestView, group: Sequence[int], home: int) -> IterationPlan:
    """Return a prefill on `group` that stays at home, and leases there."""
    if view.is_decoding:
        return IterationPlan((decode([view], (home,), {view.request_id: home}, num_steps=LEASE),))
    return IterationPlan((prefill([view], group, keep_on=(home,)),))


def _prefill_long(view: RequestView) -> IterationPlan:
    """Two chunks on two instances and one on three, which two keep; after the preemption all on one."""
    if view.num_output_tokens:
        return IterationPlan((prefill([view], (1,)),))
    if view.num_computed_tokens < 2 * CHUNK:
        weighed = (
            Alternative("1 instance", 0.61),
            Alternative("2 instances", 0.33),
            Alternative("3 instances", float("inf")),
        )
        why = Decision(DecisionKind.DOP, (LONG,), "2 instances", weighed)
        return IterationPlan((prefill([view], (0, 1), num_tokens=CHUNK),), decisions=(why,))
    why = Decision(DecisionKind.DOP, (LONG,), "3 instances, as 2 is idle now")
    batch = prefill([view], (0, 1, 2), keep_on=(0, 1))
    return IterationPlan((batch,), decisions=(why,))


def _predicted(batch: BatchPlan, snapshot: Snapshot, cost_model: CostModel) -> BatchPlan:
    """Return the batch with a prediction that is a little too low."""
    placements = {view.request_id: view.placement for view in snapshot.request.values()}
    first_step = replace(batch, num_steps=1)
    return replace(batch, predicted_time=0.96 * cost_model.step_time(step_work(first_step, placements)))
