"""`esp` on groups that never change: the policies `esp-fixed-N`.

They keep the order, deadlines, deferral and chunks of `esp`, so the difference to `esp` is the value of
elasticity. Groups do not grow or shrink, and KV is not moved or retained. A request stays in its group.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import ClassVar

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.instance import ESPGroup
from loong.core.plan import IterationPlan, KVMigration
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot
from loong.scheduler.baselines.least_work import assigned_places
from loong.scheduler.common.cluster_parts import Parts, groups_of, split
from loong.scheduler.common.planning_view import InstanceSet, PlanningView, joined, make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.ablations import InPlaceStep
from loong.scheduler.esp.admission import Refusal
from loong.scheduler.esp.batching import BatchBuilder
from loong.scheduler.esp.consolidation import KVConsolidation
from loong.scheduler.esp.planner import ElasticPlanner, plan_view
from loong.scheduler.esp.step_builder import StepBuilder


@dataclass(frozen=True)
class GroupView(PlanningView):
    """A fixed group: one instance set of all its instances, unless nothing waits and all are in flight."""

    num_cluster_instances: int = 0

    @property
    def cluster_size(self) -> int:
        """Return the full instances of the whole cluster.

        Default targets are multiples of its fastest prefill.
        """
        return self.num_cluster_instances

    def pausing(self, paused_ids: Set[RequestId]) -> "GroupView":
        """Return a new view of the same group that leaves these requests alone."""
        return make_group_view(self.snapshot, self.num_cluster_instances, paused_ids)


def make_group_view(
    part: Snapshot, num_cluster_instances: int, paused_ids: Set[RequestId] = frozenset()
) -> GroupView:
    """Sort the requests on the instances of `part`, which run all batches together."""
    found = make_planning_view(part, paused_ids)
    occupied = found.occupied
    if found.free and (occupied or found.waiting):
        occupied = (joined(found.instance_sets),)
    return GroupView(part, found.capacity, found.free, found.waiting, occupied, num_cluster_instances)


class _WholeGroupStep(InPlaceStep):
    @property
    def group(self) -> ESPGroup:
        """Return the whole group, with or without work for each instance."""
        return self.ring


class _WholeGroup(BatchBuilder):
    step: ClassVar[type[StepBuilder]] = _WholeGroupStep


class NoConsolidation(KVConsolidation):
    """A consolidation without migrations."""

    def migrations(self, instance_set: InstanceSet) -> tuple[KVMigration, ...]:  # noqa: ARG002
        """Return no moves."""
        return ()


class FixedPlanner(ElasticPlanner):
    """Planner of one fixed group."""

    batch_builder: ClassVar[type[BatchBuilder]] = _WholeGroup
    consolidation: ClassVar[type[KVConsolidation]] = NoConsolidation


def plan_esp_fixed(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, size: int
) -> IterationPlan:
    """Assign prompts to groups of `size` instances, and plan each group by itself."""
    parts = groups_of(tuple(sorted(snapshot.pools)), size)
    if not parts:
        return IterationPlan()
    return plan_parts(snapshot, parts, cost_model, config, len(snapshot.pools))


def plan_parts(
    snapshot: Snapshot,
    parts: Parts,
    cost_model: CostModel,
    config: PolicyConfig,
    num_cluster_instances: int,
) -> IterationPlan:
    """Assign prompts to these groups, and plan each group by itself."""
    found = make_planning_view(snapshot)
    assigned, others = assigned_places(found, parts, cost_model, config, FixedPlanner.order)
    plan = joined_plan(
        plan_group(part, cost_model, config, num_cluster_instances)
        for part in split(snapshot, parts, assigned)
        if part.waiting or any(view.is_plannable for view in part.running)
    )
    if not others:
        return plan
    waiting_ids = tuple(view.request_id for view in others)
    refused = Decision(DecisionKind.WAIT, waiting_ids, Refusal.NOT_CONSIDERED.value)
    return replace(plan, decisions=(*plan.decisions, refused))


def plan_group(
    part: Snapshot, cost_model: CostModel, config: PolicyConfig, num_cluster_instances: int
) -> IterationPlan:
    """Plan a fixed group of all instances of `part`."""
    return plan_view(make_group_view(part, num_cluster_instances), cost_model, config, FixedPlanner)


def joined_plan(plans: Iterable[IterationPlan]) -> IterationPlan:
    """Merge the plans of several parts into one. The first step at which one of them ends a lease holds."""
    each = tuple(plans)
    ends = sorted((end for plan in each for end in plan.lease_ends), key=attrgetter("step"), reverse=True)
    return IterationPlan(
        batches=tuple(batch for plan in each for batch in plan.batches),
        migrations=tuple(migration for plan in each for migration in plan.migrations),
        preemptions=tuple(preemption for plan in each for preemption in plan.preemptions),
        lease_ends=tuple({end.batch_id: end for end in ends}.values()),
        decisions=tuple(decision for plan in each for decision in plan.decisions),
    )
