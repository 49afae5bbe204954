"""The cluster in the published policy's terms: idle instances, and decode batches with their groups."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import InstanceWork, StepWork
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch
from loong.scheduler.common.leases import arrival_order
from loong.scheduler.common.planning_view import InstanceSet, PlanningView
from loong.scheduler.config import PolicyConfig


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """A batch B_i that decodes on its group G_i: not in flight, or in leases that can end after a step."""

    instance_ids: tuple[InstanceId, ...]
    views: list[RequestView]
    leases: tuple[RunningBatch, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Return whether it is not in flight."""
        return not self.leases


@dataclass(slots=True)
class PaperCluster:
    """The cluster that the published policy plans. `free` is the slots of each full instance.

    Requests of sets in `repairing` have lost KV. `idle` have no work; of them, `emptying` still send KV away,
    and their slots are those that they will have. `receiving` are yet to get some KV. Instances with a step
    that cannot end early are left out.
    """

    planning_view: PlanningView
    cost_model: CostModel
    config: PolicyConfig
    free: dict[InstanceId, int]
    repairing: list[InstanceSet] = field(default_factory=list)
    idle: list[InstanceId] = field(default_factory=list)
    decoding: list[DecodeBatch] = field(default_factory=list)
    emptying: set[InstanceId] = field(default_factory=set)
    receiving: set[InstanceId] = field(default_factory=set)

    @classmethod
    def of(cls, found: PlanningView, cost_model: CostModel, config: PolicyConfig) -> "PaperCluster":
        """Sort the instance sets of a planning view."""
        cluster = cls(found, cost_model, config, dict(found.free))
        cluster.emptying.update(m.segment.instance_id for m in found.snapshot.migrations)
        cluster.receiving.update(m.destination_id for m in found.snapshot.migrations)
        for instance_set in found.instance_sets:
            cluster._sort(instance_set)
        cluster.emptying.intersection_update(cluster.idle)
        cluster.free.update((i, found.snapshot.instance[i].kv_capacity) for i in cluster.emptying)
        return cluster

    def _sort(self, instance_set: InstanceSet) -> None:
        if instance_set.is_in_lease:
            requests = self.planning_view.snapshot.request
            in_flight = [requests[r] for batch in instance_set.batches for r in batch.plan.request_ids]
            views = [*instance_set.decodes, *(view for view in in_flight if not view.has_ended)]
            if views:
                self.decoding.append(DecodeBatch(instance_set.instance_ids, views, instance_set.batches))
        elif instance_set.is_ready and instance_set.prefills:
            self.repairing.append(instance_set)
        elif instance_set.is_ready and instance_set.decodes:
            self.decoding.append(DecodeBatch(instance_set.instance_ids, instance_set.decodes))
        elif instance_set.is_ready and self.receiving.isdisjoint(instance_set.instance_ids):
            self.idle += instance_set.instance_ids

    def batch_on(self, instance_id: InstanceId) -> DecodeBatch:
        """Return the decode batch whose group has an instance."""
        return next(batch for batch in self.decoding if instance_id in batch.instance_ids)

    def num_free(self, instance_ids: Iterable[InstanceId]) -> int:
        """Return the free slots of some instances."""
        return sum(self.free[i] for i in instance_ids)

    def num_demanded(self, batch: DecodeBatch) -> int:
        """Return the slots for the next lease of a batch; a running one has them."""
        if not batch.is_ready:
            return 0
        return sum(min(self.config.lease_steps, view.num_remaining_tokens) for view in batch.views)

    def num_spare(self, batch: DecodeBatch) -> int:
        """Return the free slots of its group beyond its next lease."""
        return self.num_free(batch.instance_ids) - self.num_demanded(batch)

    def prefill_time(self, views: Iterable[RequestView], dop: int) -> float:
        """Return T(R, E) in seconds: prompts computed together on `dop` instances."""
        lengths = [view.num_uncomputed_tokens for view in views]
        return self.cost_model.prefill_terms(dop).time(
            sum(lengths), 0, sum(n * n for n in lengths), len(lengths)
        )

    def decode_step_time(self, batch: DecodeBatch) -> float:
        """Return the seconds of one of its steps, with masters and KV spread evenly over its group."""
        dop, num_requests = len(batch.instance_ids), len(batch.views)
        work = InstanceWork(
            num_requests=num_requests,
            num_tokens=-(-num_requests // dop),
            num_blocks=-(-num_requests // dop),
            num_attends=num_requests,
            num_decode_keys=sum(view.num_known_tokens for view in batch.views) // dop,
        )
        group = ESPGroup(batch.instance_ids)
        works = dict.fromkeys(batch.instance_ids, work)
        return self.cost_model.step_time(
            StepWork(group, works, has_ring=False, has_exchange=dop > 1, is_first=False)
        )


def age(batch: DecodeBatch) -> tuple[float, str]:
    """Return when its oldest request came."""
    return min(map(arrival_order, batch.views))
