"""Baselines: groups that never change, each with chunked prefill mixed with decode."""

from collections.abc import Callable
from typing import TypeAlias

from loong.core.cost_model import CostModel
from loong.core.instance import ElasticInstance
from loong.core.plan import IterationPlan, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.batching import keep_on_all, lease_ends, plan_batch
from loong.scheduler.cell import Cell, arrival_order, cells_of, full_instances, num_wished_tokens
from loong.scheduler.config import PolicyConfig

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
    for view in snapshot.waiting:
        if not view.is_plannable:
            continue
        index = max(range(len(cells)), key=lambda i: cells[i].num_spare)
        if num_wished_tokens(view, config.lease_steps) > cells[index].num_spare:
            break
        cells[index] = cells[index].joined(view, config.lease_steps)
    return IterationPlan(
        batches=tuple(plan_batch(cell, cost_model, config, keep_on_all) for cell in cells if cell.is_ready),
        preemptions=tuple(Preemption(view.request_id) for view in victims),
        lease_ends=lease_ends(cells),
    )


def preempt_latest(cell: Cell, lease_steps: int) -> tuple[Cell, list[RequestView]]:
    """The cell without those of its latest arrivals, never the first, that its next step has no room for."""
    preempted = []
    while cell.num_missing > 0 and len(cell.views) > 1:
        latest = max(cell.views, key=arrival_order)
        preempted.append(latest)
        cell = cell.without(latest, lease_steps)
    return cell, preempted
