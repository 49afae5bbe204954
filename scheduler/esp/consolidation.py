"""Consolidation of KV that is not in flight, where the cost model predicts a gain.

A request whose KV is on several instances ties them together for every token. After consolidation it decodes
on one of them, and the others are free for other batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import InstanceWork, WorkCount
from loong.core.instance import ESPGroup
from loong.core.plan import KVMigration
from loong.core.request import RequestView
from loong.scheduler.common.planning_view import InstanceSet, PlanningView
from loong.scheduler.common.slo_targets import target_tpot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.tuning import MAX_MIGRATION_SHARE, SLOW_DECODE_FACTOR


@dataclass(frozen=True, slots=True)
class KVConsolidation:
    """Decides which requests are consolidated."""

    planning_view: PlanningView
    cost_model: CostModel
    config: PolicyConfig

    def migrations(self, instance_set: InstanceSet) -> tuple[KVMigration, ...]:
        """Return the moves that consolidate one of the requests that tie a ready instance set together."""
        num_beside = len(instance_set.decodes) * self.config.lease_steps
        if num_beside >= max(self.planning_view.free[i] for i in instance_set.instance_ids):
            return ()
        return next(filter(None, (self._consolidate(view, num_beside) for view in _tying(instance_set))), ())

    def is_slow(self, instance_set: InstanceSet) -> bool:
        """Return whether communication takes most of a step of a decode that ties the set together."""
        if (view := next(_tying(instance_set), None)) is None:
            return False
        work = WorkCount(instance_set.instance_ids)
        work.add_decode(view.placement.instance_ids[0], view.placement)
        step = work.step(ESPGroup(instance_set.instance_ids), is_first=False)
        alone = max(map(self.cost_model.instance_time, step.instances.values()))
        alone += self.cost_model.prefill_terms(1).overhead
        return self.cost_model.step_time(step) > SLOW_DECODE_FACTOR * alone

    def _consolidate(self, view: RequestView, num_beside: int) -> tuple[KVMigration, ...]:
        """Return the moves of a request to the instance with most of its KV.

        `num_beside` slots stay free there.
        """
        held = view.placement.tokens_by_instance()
        destination_id = max(held, key=lambda i: (held[i], -i))
        num_moved = view.num_computed_tokens - held[destination_id]
        num_demanded = num_moved + min(view.num_remaining_tokens, self.config.lease_steps)
        if num_demanded + num_beside > self.planning_view.free[destination_id]:
            return ()
        work = InstanceWork(num_tokens=1, num_blocks=1, num_attends=1, num_decode_keys=view.num_known_tokens)
        step_time = self.cost_model.prefill_terms(1).overhead + self.cost_model.instance_time(work)
        seconds = sum(
            self.cost_model.migration_time(n, i, destination_id)
            for i, n in held.items()
            if i != destination_id
        )
        is_quick = step_time <= target_tpot(view, self.config) / 2
        if not is_quick or seconds > MAX_MIGRATION_SHARE * view.num_remaining_tokens * step_time:
            return ()
        return tuple(
            KVMigration(segment, destination_id)
            for segment in view.placement.segments
            if segment.instance_id != destination_id
        )


def _tying(instance_set: InstanceSet) -> Iterator[RequestView]:
    """Yield the decodes that tie an instance set together and share no KV with others."""
    return (v for v in instance_set.decodes if len(v.placement.instance_ids) > 1 and v.primary_id is None)
