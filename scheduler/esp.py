"""Elastic sequence parallelism that keeps deadlines: the policy `esp`.

Dispatch orders the prompts and admits them, allocation and batching give them instances, scaling makes each
group's next step. A group whose units do not come free together waits for the last of them, and decodes
meanwhile; leases that are in the way end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from operator import attrgetter
from typing import ClassVar

from loong.core.cost_model import CostModel
from loong.core.decision import Decision
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.allocation import Allocation
from loong.scheduler.config import PolicyConfig
from loong.scheduler.dispatch import Dispatch, Dispatched, Order, Prefill, by_deadline
from loong.scheduler.group import Group
from loong.scheduler.leases import LONG_LEASES, telling_time
from loong.scheduler.migration import Gathering
from loong.scheduler.parking import parked_ids
from loong.scheduler.reasons import (
    reason_to_end_lease,
    reason_to_gather,
    reason_to_hold_back,
    reason_to_park,
    reason_to_preempt,
    reasons_to_begin,
    reasons_to_put_off,
    reasons_to_wait,
    reasons_while_busy,
)
from loong.scheduler.safety import safety
from loong.scheduler.scaling import Scaling
from loong.scheduler.survey import Survey, Unit, survey

PLAN_SECONDS = 20e-6  # of the engine, that a request in a batch costs it to plan, check and send twice
PLAN_SHARE = 0.3  # of the engine's time that planning may take when all instances decode
TELLING_SHARE = 0.2  # of a lease and of the prompts after it, that it may take to tell of decodes
LONGEST_WAIT = 0.1  # of the TTFT target, that prompts may gather for

_arrival = attrgetter("arrival_time", "request_id")


@dataclass(slots=True)
class ElasticPlanner:
    """A plan in the making; groups leave `left` when they have been planned.

    The class attributes are the parts that it is composed of; ablations are other compositions.
    """

    survey: Survey
    cost_model: CostModel
    config: PolicyConfig
    left: list[Group] = field(default_factory=list)
    batches: list[BatchPlan] = field(default_factory=list)
    lease_ends: dict[int, LeaseEnd] = field(default_factory=dict)  # of each batch, the earliest
    migrations: list[KVMigration] = field(default_factory=list)
    preempted: list[RequestView] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    long_lease_steps: int = 0

    parks: bool = True  # late prompts that would tie instances together

    order: ClassVar[Order] = staticmethod(by_deadline)
    allocation: ClassVar[type[Allocation]] = Allocation
    scaling: ClassVar[type[Scaling]] = Scaling
    gathering: ClassVar[type[Gathering]] = Gathering

    def plan(self) -> IterationPlan:
        """The whole plan."""
        if self.survey.waiting or self.survey.resting:
            if self.survey.is_any_usable:
                self._plan_usable()
            else:
                self.decisions += reasons_while_busy(self.survey)
        return IterationPlan(
            batches=tuple(self.batches),
            migrations=tuple(self.migrations),
            preemptions=tuple(Preemption(view.request_id) for view in self.preempted),
            lease_ends=tuple(self.lease_ends.values()),
            decisions=tuple(self.decisions),
        )

    def _plan_usable(self) -> None:
        dispatched = Dispatch(self.survey, self.cost_model, self.config, type(self).order).dispatch()
        self._hold_back(dispatched)
        groups = self.allocation(self.survey, self.cost_model, self.config).allocate(dispatched.prefills)
        self._make_all(groups)
        batch_of = {request_id: batch for batch in self.batches for request_id in batch.request_ids}
        computed = [prefill for prefill in dispatched.prefills if prefill.view.request_id in batch_of]
        self.decisions += reasons_to_begin(computed, batch_of, self.cost_model, self.survey)
        self.decisions += reasons_to_put_off(computed)
        self.decisions += reasons_to_wait(dispatched, groups, batch_of)

    def _hold_back(self, dispatched: Dispatched) -> None:
        """Let those rest whose next slots others need to end."""
        most_steps = self.config.lease_steps * (LONG_LEASES if self.survey.is_quiet else 1)
        safe = safety(self.survey, dispatched.prefills, most_steps)
        self.long_lease_steps = safe.lease_steps
        if safe.lease_steps < self.config.lease_steps:
            self.config = replace(self.config, lease_steps=safe.lease_steps)
        if safe.paused_ids:
            dispatched.hold_back(safe.paused_ids)
            self.decisions.append(reason_to_hold_back(safe.paused_ids))
        if self.parks:
            self._park(dispatched)
        for unit in self.survey.resting if safe.paused_ids else ():
            unit.decodes = [view for view in unit.decodes if view.request_id not in safe.paused_ids]

    def _park(self, dispatched: Dispatched) -> None:
        """Let late prompts rest that would tie instances together, while others have enough to do."""
        if parked := parked_ids(dispatched, self.survey, self.cost_model, self.config):
            dispatched.hold_back(parked)
            self.survey = survey(self.survey.snapshot, parked)
            self.decisions.append(reason_to_park(parked))

    def _make_all(self, groups: Sequence[Group]) -> None:
        """Plan every group, those first that need room of the others, and of these those of the oldest."""
        waiting = [group for group in groups if not group.is_ready]
        ready = (group for group in groups if group.is_ready)
        self.left = sorted(ready, key=lambda group: (self._has_room(group), _age(group)))
        for group in waiting:
            if group.prefills:
                first_id = group.prefills[0].view.request_id
                self._end_leases(group.units, group.prefills, f"{first_id} is to have its instances")
                self._decode_meanwhile(group)
        while self.left and not self.preempted:
            self._make(self.left.pop(0))

    def _make(self, group: Group) -> None:
        """Plan a group, with as many others as it needs for room; without any, preempt."""
        if len(group.units) == 1 and group.dop > 1:
            self._gather(group.units[0], has_prompts=bool(group.prefills))
        scaling = self._scaling()
        batch = self._lease_first(group, scaling) or scaling.batch(group)
        while batch is None and _has_requests(group) and (roomy := list(filter(self._num_free, self.left))):
            other = max(roomy, key=lambda g: (not _has_requests(g), self._num_free(g)))
            self.left.remove(other)
            group = Group(
                group.units + other.units, group.prefills + other.prefills, group.spare + other.spare
            )
            batch = scaling.batch(group)
        if batch is not None:
            self.batches.append(batch)
        elif _has_requests(group):
            busy = [unit for unit in self.survey.units if not unit.is_ready]
            self._end_leases(busy, group.prefills, "others need slots to go on")
            snapshot = self.survey.snapshot
            in_flight = busy or self.batches or self.migrations or snapshot.migrations or snapshot.ending
            if not in_flight:
                self._preempt(group)

    def _scaling(self) -> Scaling:
        return self.scaling(self.survey, self.cost_model, self.config, self.long_lease_steps)

    def _lease_first(self, group: Group, scaling: Scaling) -> BatchPlan | None:
        """A lease while prompts that have just come gather, where planning for each would cost too much."""
        unit = group.units[0]
        if len(group.units) > 1 or not group.prefills or any(p.is_begun for p in group.prefills):
            return None
        first = min(prefill.view.arrival_time for prefill in group.prefills)
        seconds = first + self._least_lease(unit, group.prefills) - self.survey.snapshot.now
        return scaling.lease(unit.instance_ids, unit.decodes, seconds) if seconds > 0 else None

    def _least_lease(self, unit: Unit, prefills: Sequence[Prefill]) -> float:
        """Seconds that a lease lasts at least, once the first prompt waits for its end, while they are few.

        Else chats that come one by one have a step each, most of whose time goes to telling of all decodes;
        and the engine's to planning, where it has tokens to hand on.
        """
        seconds = PLAN_SECONDS * unit.num_decodes * self.survey.num_instances / PLAN_SHARE
        if prefills:
            telling = telling_time(unit.instance_ids, unit.num_decodes, self.cost_model)
            seconds = max(seconds, telling / TELLING_SHARE - sum(prefill.work for prefill in prefills))
        return min(seconds, LONGEST_WAIT * min([self.config.target_ttft, *(p.ttft for p in prefills)]))

    def _gather(self, unit: Unit, *, has_prompts: bool) -> None:
        gathering = self.gathering(self.survey, self.cost_model, self.config)
        if has_prompts and not gathering.is_slow(unit):
            return  # the prompts would tie it together again
        moves = gathering.migrations(unit)
        for move in moves:
            self.survey.free[move.destination_id] -= len(move.segment.positions)
        self.migrations += moves
        self.decisions += map(reason_to_gather, moves[:1])
        moving = {move.segment.owner_id for move in moves}
        unit.decodes = [view for view in unit.decodes if view.request_id not in moving]

    def _preempt(self, group: Group) -> None:
        """Drop the KV of the latest arrival; the oldest, left alone, has room."""
        full = self.survey.free.keys()
        holders = [v for v in self.survey.snapshot.running if full >= set(v.placement.instance_ids)]
        if len(holders) > 1:
            latest = max(holders, key=lambda v: (v.arrival_time, v.request_id))
            self.preempted.append(latest)
            self.decisions.append(reason_to_preempt(latest, len(holders), self._num_free(group)))

    def _num_free(self, group: Group) -> int:
        return sum(self.survey.free[i] for unit in group.units for i in unit.instance_ids)

    def _has_room(self, group: Group) -> bool:
        """Whether it has a slot for every decode, or one for its prompts."""
        return self._num_free(group) >= max(1, sum(len(unit.decodes) for unit in group.units))

    def _end_leases(self, units: Iterable[Unit], prefills: Sequence[Prefill], wish: str) -> None:
        for unit, batch in ((u, b) for u in units for b in u.batches if b.can_end_early):
            first = min((prefill.view.arrival_time for prefill in prefills), default=0.0)
            stop = max(first, batch.started_at) + self._least_lease(unit, prefills)
            due = min((prefill.deadline - prefill.work for prefill in prefills), default=inf)
            left = min(stop, due) - batch.stepped_at
            step = batch.num_steps_taken + max(1, ceil(left / (batch.plan.predicted_time or 1.0)))
            end = self.lease_ends.get(batch.batch_id)
            if step < (batch.last_step if end is None else end.step):
                self.lease_ends[batch.batch_id] = LeaseEnd(batch.batch_id, step)
                self.decisions.append(reason_to_end_lease(batch, wish))

    def _decode_meanwhile(self, group: Group) -> None:
        for unit in group.units:
            if unit.is_ready:
                seconds = group.available_in - unit.available_in
                batch = self._scaling().lease(unit.instance_ids, unit.decodes, seconds)
                if batch is not None:
                    self.batches.append(batch)


def _has_requests(group: Group) -> bool:
    return bool(group.prefills) or any(unit.decodes for unit in group.units)


def _age(group: Group) -> tuple[float, str]:
    """When its oldest request came; never, if it has none."""
    views = [v for unit in group.units for v in unit.decodes] + [p.view for p in group.prefills]
    return min(map(_arrival, views), default=(float("inf"), ""))


def plan_esp(
    snapshot: Snapshot,
    cost_model: CostModel,
    config: PolicyConfig,
    planner: type[ElasticPlanner] = ElasticPlanner,
) -> IterationPlan:
    """Plan every unit that can run now.

    If nothing runs then, and nothing ran before, no event would come: those that were parked go on.
    """
    plan = planner(survey(snapshot), cost_model, config).plan()
    will_go_on = snapshot.batches or snapshot.ending or snapshot.migrations
    if will_go_on or plan.batches or plan.migrations or plan.preemptions:
        return plan
    return planner(survey(snapshot), cost_model, config, parks=False).plan()
