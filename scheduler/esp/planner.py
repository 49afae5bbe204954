"""Elastic sequence parallelism that keeps deadlines: the policy `esp`.

Admission orders the prompts and admits them, allocation gives them instances, batching makes each group's
next step. A group whose instance sets do not become free together decodes until the last of them is free.
Leases that delay it end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import ClassVar

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.planning_view import InstanceSet, PlanningView, make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import (
    AdmissionDecision,
    Order,
    PrefillAdmission,
    PrefillCandidate,
    by_deadline,
)
from loong.scheduler.esp.allocation import Allocation
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.consolidation import KVConsolidation
from loong.scheduler.esp.deferral import deferred_ids_to_pause
from loong.scheduler.esp.group import Group
from loong.scheduler.esp.kv_safety import kv_safety
from loong.scheduler.esp.lease_timing import last_step_before, least_lease_seconds
from loong.scheduler.esp.reasons import (
    reason_to_consolidate,
    reason_to_end_lease,
    reason_to_pause,
    reason_to_pause_deferred,
    reason_to_preempt,
    reasons_to_begin,
    reasons_to_defer,
    reasons_to_wait,
    reasons_while_busy,
)
from loong.scheduler.tuning import LONG_LEASE_FACTOR

_arrival = attrgetter("arrival_time", "request_id")


@dataclass(slots=True)
class ElasticPlanner:
    """Builds a plan; groups leave `left` when they have been planned.

    The class attributes are its parts; ablations replace some of them.
    """

    planning_view: PlanningView
    cost_model: CostModel
    config: PolicyConfig
    left: list[Group] = field(default_factory=list)
    batches: list[BatchPlan] = field(default_factory=list)
    lease_ends: dict[int, LeaseEnd] = field(default_factory=dict)  # of each batch, the earliest
    migrations: list[KVMigration] = field(default_factory=list)
    preempted: list[RequestView] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    long_lease_steps: int = 0

    pauses_deferred: bool = True  # deferred prompts that would tie instances together

    order: ClassVar[Order] = staticmethod(by_deadline)
    allocation: ClassVar[type[Allocation]] = Allocation
    batch_builder: ClassVar[type[BatchBuilder]] = BatchBuilder
    consolidation: ClassVar[type[KVConsolidation]] = KVConsolidation

    def plan(self) -> IterationPlan:
        """Return the whole plan."""
        if self.planning_view.waiting or self.planning_view.occupied:
            if self.planning_view.is_any_usable:
                self._plan_usable()
            else:
                self.decisions += reasons_while_busy(self.planning_view)
        return IterationPlan(
            batches=tuple(self.batches),
            migrations=tuple(self.migrations),
            preemptions=tuple(Preemption(view.request_id) for view in self.preempted),
            lease_ends=tuple(self.lease_ends.values()),
            decisions=tuple(self.decisions),
        )

    def _plan_usable(self) -> None:
        admission = PrefillAdmission(
            self.planning_view, self.cost_model, self.config, type(self).order
        ).admit()
        self._pause_unsafe(admission)
        groups = self.allocation(self.planning_view, self.cost_model, self.config).allocate(
            admission.prefills
        )
        self._make_all(groups)
        batch_of = {request_id: batch for batch in self.batches for request_id in batch.request_ids}
        computed = [prefill for prefill in admission.prefills if prefill.view.request_id in batch_of]
        self.decisions += reasons_to_begin(computed, batch_of, self.cost_model, self.planning_view)
        self.decisions += reasons_to_defer(computed)
        self.decisions += reasons_to_wait(admission, groups, batch_of)

    def _pause_unsafe(self, admission: AdmissionDecision) -> None:
        """Pause requests whose next slots others need to end."""
        most_steps = self.config.lease_steps * (LONG_LEASE_FACTOR if self.planning_view.is_quiet else 1)
        safe = kv_safety(self.planning_view, admission.prefills, most_steps)
        self.long_lease_steps = safe.lease_steps
        if safe.lease_steps < self.config.lease_steps:
            self.config = replace(self.config, lease_steps=safe.lease_steps)
        if safe.paused_ids:
            admission.pause(safe.paused_ids)
            self.decisions.append(reason_to_pause(safe.paused_ids))
        if self.pauses_deferred:
            self._pause_deferred(admission)
        for instance_set in self.planning_view.occupied if safe.paused_ids else ():
            instance_set.decodes = [
                view for view in instance_set.decodes if view.request_id not in safe.paused_ids
            ]

    def _pause_deferred(self, admission: AdmissionDecision) -> None:
        """Pause deferred prompts that would tie instances together, while others have enough to do."""
        if paused_ids := deferred_ids_to_pause(admission, self.planning_view, self.cost_model, self.config):
            admission.pause(paused_ids)
            self.planning_view = self.planning_view.pausing(paused_ids)
            self.decisions.append(reason_to_pause_deferred(paused_ids))

    def _make_all(self, groups: Sequence[Group]) -> None:
        """Plan every group: first those that need room of others, and those with the oldest requests."""
        waiting = [group for group in groups if not group.is_ready]
        ready = (group for group in groups if group.is_ready)
        self.left = sorted(ready, key=lambda group: (self._has_room(group), _age(group)))
        for group in waiting:
            if group.prefills:
                first_id = group.prefills[0].view.request_id
                self._end_leases(group.instance_sets, group.prefills, f"{first_id} is to have its instances")
                self._decode_meanwhile(group)
        while self.left and not self.preempted:
            self._make(self.left.pop(0))

    def _make(self, group: Group) -> None:
        """Plan a group, merged with others if it needs their room; preempt if none is left."""
        if len(group.instance_sets) == 1 and group.dop > 1:
            self._consolidate(group.instance_sets[0], has_prompts=bool(group.prefills))
        batch_builder = self._batch_builder()
        batch = self._lease_first(group, batch_builder) or batch_builder.batch(group)
        while batch is None and _has_requests(group) and (roomy := list(filter(self._num_free, self.left))):
            other = max(roomy, key=lambda g: (not _has_requests(g), self._num_free(g)))
            self.left.remove(other)
            group = Group(
                group.instance_sets + other.instance_sets,
                group.prefills + other.prefills,
                group.spare + other.spare,
            )
            batch = batch_builder.batch(group)
        if batch is not None:
            self.batches.append(batch)
        elif _has_requests(group):
            busy = [
                instance_set for instance_set in self.planning_view.instance_sets if not instance_set.is_ready
            ]
            self._end_leases(busy, group.prefills, "others need slots to go on")
            snapshot = self.planning_view.snapshot
            in_flight = busy or self.batches or self.migrations or snapshot.migrations or snapshot.ending
            if not in_flight:
                self._preempt(group)

    def _batch_builder(self) -> BatchBuilder:
        return self.batch_builder(self.planning_view, self.cost_model, self.config, self.long_lease_steps)

    def _lease_first(self, group: Group, batch_builder: BatchBuilder) -> BatchPlan | None:
        """Return a lease during which new prompts are collected, where planning for each costs too much."""
        instance_set = group.instance_sets[0]
        if len(group.instance_sets) > 1 or not group.prefills or any(p.is_begun for p in group.prefills):
            return None
        first = min(prefill.view.arrival_time for prefill in group.prefills)
        seconds = first + self._least_lease(instance_set, group.prefills) - self.planning_view.snapshot.now
        return (
            batch_builder.lease(instance_set.instance_ids, instance_set.decodes, seconds)
            if seconds > 0
            else None
        )

    def _least_lease(self, instance_set: InstanceSet, prefills: Sequence[PrefillCandidate]) -> float:
        return least_lease_seconds(
            instance_set.instance_ids,
            instance_set.num_decodes,
            prefills,
            self.cost_model,
            self.config,
            self.planning_view.num_instances,
        )

    def _consolidate(self, instance_set: InstanceSet, *, has_prompts: bool) -> None:
        consolidation = self.consolidation(self.planning_view, self.cost_model, self.config)
        if has_prompts and not consolidation.is_slow(instance_set):
            return  # the prompts would tie it together again
        moves = consolidation.migrations(instance_set)
        for move in moves:
            self.planning_view.free[move.destination_id] -= len(move.segment.positions)
        self.migrations += moves
        self.decisions += map(reason_to_consolidate, moves[:1])
        moving = {move.segment.owner_id for move in moves}
        instance_set.decodes = [view for view in instance_set.decodes if view.request_id not in moving]

    def _preempt(self, group: Group) -> None:
        """Preempt the latest arrival; the oldest, alone, has room."""
        full = self.planning_view.free.keys()
        holders = [v for v in self.planning_view.snapshot.running if full >= set(v.placement.instance_ids)]
        if len(holders) > 1:
            latest = max(holders, key=lambda v: (v.arrival_time, v.request_id))
            self.preempted.append(latest)
            self.decisions.append(reason_to_preempt(latest, len(holders), self._num_free(group)))

    def _num_free(self, group: Group) -> int:
        return sum(
            self.planning_view.free[i]
            for instance_set in group.instance_sets
            for i in instance_set.instance_ids
        )

    def _has_room(self, group: Group) -> bool:
        """Return whether it has a slot for every decode, or one for its prompts."""
        return self._num_free(group) >= max(
            1, sum(len(instance_set.decodes) for instance_set in group.instance_sets)
        )

    def _end_leases(
        self, instance_sets: Iterable[InstanceSet], prefills: Sequence[PrefillCandidate], reason: str
    ) -> None:
        for instance_set, batch in ((u, b) for u in instance_sets for b in u.batches if b.can_end_early):
            step = last_step_before(prefills, batch, self._least_lease(instance_set, prefills))
            end = self.lease_ends.get(batch.batch_id)
            if step < (batch.last_step if end is None else end.step):
                self.lease_ends[batch.batch_id] = LeaseEnd(batch.batch_id, step)
                self.decisions.append(reason_to_end_lease(batch, reason))

    def _decode_meanwhile(self, group: Group) -> None:
        for instance_set in group.instance_sets:
            if instance_set.is_ready:
                seconds = group.available_in - instance_set.available_in
                batch = self._batch_builder().lease(instance_set.instance_ids, instance_set.decodes, seconds)
                if batch is not None:
                    self.batches.append(batch)


def _has_requests(group: Group) -> bool:
    return bool(group.prefills) or any(instance_set.decodes for instance_set in group.instance_sets)


def _age(group: Group) -> tuple[float, str]:
    """Return when its oldest request came; infinity if it has none."""
    views = [v for instance_set in group.instance_sets for v in instance_set.decodes] + [
        p.view for p in group.prefills
    ]
    return min(map(_arrival, views), default=(float("inf"), ""))


def plan_esp(
    snapshot: Snapshot,
    cost_model: CostModel,
    config: PolicyConfig,
    planner: type[ElasticPlanner] = ElasticPlanner,
) -> IterationPlan:
    """Plan every instance set that can run now."""
    return plan_view(make_planning_view(snapshot), cost_model, config, planner)


def plan_view(
    view: PlanningView, cost_model: CostModel, config: PolicyConfig, planner: type[ElasticPlanner]
) -> IterationPlan:
    """Plan every instance set of `view` that can run now. The planner changes the view.

    If nothing would run then, no event would come. In that case paused prompts go on.
    """
    snapshot = view.snapshot
    plan = planner(view, cost_model, config).plan()
    if snapshot.is_anything_in_flight or plan.batches or plan.migrations or plan.preemptions:
        return plan
    return planner(view.pausing(frozenset()), cost_model, config, pauses_deferred=False).plan()
