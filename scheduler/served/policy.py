"""Decodes and prompts on instances of their own, with no KV moved: `esp-served` and `esp-served-N`.

The last instances decode, as few as meet the TPOT target. The others compute prompts, in one group or in
groups of N, as `esp-fixed-N` does, and serve the KV that they have computed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.decision import DecisionKind
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.baselines.esp_fixed import plan_esp_fixed, plan_parts
from loong.scheduler.common.cluster_parts import groups_of
from loong.scheduler.config import PolicyConfig
from loong.scheduler.served.decodes import ServedDecodes


def plan_esp_served(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, size: int | None = None
) -> IterationPlan:
    """Plan decodes on the last instances, and prompts on the others in groups of `size` (None: in one)."""
    instance_ids = tuple(sorted(snapshot.pools))
    if len(instance_ids) < 2:
        return plan_esp_fixed(snapshot, cost_model, config, 1)
    decodes = ServedDecodes.of(snapshot, cost_model, config)
    apart = decodes.busy_ids.union(decodes.instance_ids)
    parts = prompt_groups(tuple(i for i in instance_ids if i not in apart), size)
    plan = plan_parts(_without(decodes, snapshot), parts, cost_model, config, len(instance_ids))
    if decodes.all_views or is_anything_in_flight(snapshot):  # which leave room when they end
        kept = tuple(decision for decision in plan.decisions if decision.kind is not DecisionKind.PREEMPT)
        plan = replace(plan, preemptions=(), decisions=kept)
    lease, ends = decodes.lease(), decodes.lease_ends()
    batches = plan.batches if lease is None else (*plan.batches, lease)
    victim = None
    if decodes.resting and not (batches or plan.preemptions or is_anything_in_flight(snapshot)):
        victim = decodes.victim()
    return replace(
        plan,
        batches=batches,
        preemptions=plan.preemptions if victim is None else (Preemption(victim.request_id),),
        lease_ends=(*plan.lease_ends, *ends),
        decisions=(*plan.decisions, *decodes.decisions(lease, ends, victim)),
    )


def is_anything_in_flight(snapshot: Snapshot) -> bool:
    """Return whether an event will come even without a plan."""
    return bool(snapshot.batches or snapshot.ending or snapshot.migrations)


def max_tokens_of_halves(pools: Mapping[InstanceId, int], size: int | None) -> int:
    """Return the most KV that one request may come to: the smaller of a prompt's group and all for decodes.

    These are where decodes have as many instances as they may.
    """
    instance_ids = tuple(sorted(pools))
    num_decode = len(instance_ids) // 2
    groups = prompt_groups(instance_ids[: len(instance_ids) - num_decode], size)
    largest = max(sum(pools[i] for i in group) for group in groups)
    return min(largest, sum(pools[i] for i in instance_ids[-num_decode:])) if num_decode else largest


def prompt_groups(
    instance_ids: tuple[InstanceId, ...], size: int | None
) -> tuple[tuple[InstanceId, ...], ...]:
    """Return the groups of instances that compute prompts."""
    return groups_of(instance_ids, size) if size else ((instance_ids,) if instance_ids else ())


def _without(decodes: ServedDecodes, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot in which no plan may name the decodes, whose KV stays where it is."""
    in_flight = {request_id for batch in decodes.leases for request_id in batch.plan.request_ids}

    def left() -> Iterator[RequestView]:
        for view in snapshot.running:
            if view.request_id in in_flight or (view.is_plannable and view.is_decoding):
                if not view.has_ended:
                    yield replace(view, batch_id=None, is_migrating=True)
            else:
                yield view

    return replace(snapshot, running=tuple(left()))
