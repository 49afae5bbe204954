"""Baselines: groups that never change, each with chunked prefill mixed with decode."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeAlias

from loong.core.cost_model import CostModel
from loong.core.instance import ElasticInstance
from loong.core.plan import IterationPlan, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.batching import keep_on_all, lease_ends, plan_batch
from loong.scheduler.cell import Cell, cells_of, full_instances, merged_into
from loong.scheduler.config import PolicyConfig
from loong.scheduler.room import preempt_latest

Partition: TypeAlias = Callable[[tuple[ElasticInstance, ...]], list[tuple[ElasticInstance, ...]]]


def one_group(instances: tuple[ElasticInstance, ...]) -> list[tuple[ElasticInstance, ...]]:
    """All instances in one group."""
    return [instances]


def each_alone(instances: tuple[ElasticInstance, ...]) -> list[tuple[ElasticInstance, ...]]:
    """A group for every instance."""
    return [(instance,) for instance in instances]


def plan_fixed_groups(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, partition: Partition
) -> IterationPlan:
    """Run every idle group of `partition`; requests go, first come first served, where most room is spare."""
    parts = partition(full_instances(snapshot.instances))
    cells = cells_of(snapshot, (part for part in parts if part), config.lease_steps)
    victims: list[RequestView] = []
    for index, cell in enumerate(cells):
        cells[index], preempted = preempt_latest(cell, config.lease_steps)
        victims += preempted
    for view in filter(attrgetter("is_plannable"), snapshot.waiting):
        homes = _homes(view, cells, snapshot)
        home = max(homes, key=lambda cell: cell.num_spare, default=Cell()).joined(view, config.lease_steps)
        if home.num_spare < 0:
            break
        cells = merged_into(cells, home)
    return IterationPlan(
        batches=tuple(plan_batch(cell, cost_model, config, keep_on_all) for cell in cells if cell.is_ready),
        preemptions=tuple(Preemption(view.request_id) for view in victims),
        lease_ends=lease_ends(cells),
    )


def _homes(view: RequestView, cells: Sequence[Cell], snapshot: Snapshot) -> list[Cell]:
    """The cells that can hold a request to its end if it is alone there."""
    num_tokens = view.num_prompt_tokens + view.max_tokens - 1
    return [c for c in cells if sum(snapshot.instance[i].kv_capacity for i in c.free) >= num_tokens]
