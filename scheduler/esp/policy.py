"""Elastic sequence parallelism that keeps deadlines: the policy `esp`.

The instances of a batch, its group, are chosen anew at every chunk boundary:

- Where all prompts are short and targets loose, each instance runs its own requests. So it does where
  decodes that read KV of others would miss the TPOT target. A request that is alone is computed by all, if
  its KV ends on one.
- Otherwise the last instances decode, as few as meet the TPOT target, each requests of its own. The others
  compute prompts in one group, and serve the KV that stays there. A context that one instance reads too
  slowly is decoded by that group, before it goes on with prompts.
- Where steps on all instances with decodes and prompts compute more prompts, they run together.

Several hosts are planned one by one. Those that a request needs together are planned together while it runs.
While hosts are joined, on GPUs every other request keeps its KV on one host, so that hosts can part again.
"""

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cached_prefixes import reading, with_borrowings
from loong.scheduler.common.cluster_parts import groups_of, hosts_of
from loong.scheduler.common.joined_hosts import joined_hosts
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.draft import Variant
from loong.scheduler.esp.lone_instances import ends_on_one, is_alone, suits_lone_instances
from loong.scheduler.esp.memory import plan_with_memory
from loong.scheduler.esp.memory_use import fits_elsewhere, needs_memory, without_memory
from loong.scheduler.esp.parts import plan_parts
from loong.scheduler.esp.prompt_order import by_arrival
from loong.scheduler.esp.stages import is_any_usable, plan_part, plan_while_busy

ESP = Variant()
ABLATIONS = {
    "esp-fcfs": Variant(order=by_arrival),
    "esp-no-chunks": Variant(has_chunks=False),
    "esp-no-apart": Variant(has_apart=False),
    "esp-no-light-apart": Variant(has_light_apart=False),
    "esp-no-guests": Variant(has_guests=False),
    "esp-no-spread": Variant(has_spread=False),
    "esp-no-masters": Variant(has_masters=False),
    "esp-no-memory": Variant(has_memory=False),
    "esp-no-moves": Variant(has_moves=False),
    "esp-no-proactive": Variant(has_proactive=False),
    "esp-no-lone": Variant(has_lone_instances=False),
    "esp-no-copies": Variant(has_copies=False),
}
"""Variants of `esp` without one of its parts, to measure the value of that part."""


def plan_esp(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, variant: Variant = ESP
) -> IterationPlan:
    """Plan every instance that can run now."""
    has_memory = variant.has_memory and bool(snapshot.memory_pools)
    if has_memory and needs_memory(snapshot, cost_model, config):
        return plan_with_memory(snapshot, cost_model, config, variant)
    has_memory = has_memory and fits_elsewhere(snapshot)
    if not has_memory:
        snapshot = without_memory(snapshot)
    if not is_any_usable(snapshot, snapshot.pools):
        return plan_while_busy(snapshot)
    plan, each = None, groups_of(tuple(sorted(snapshot.pools)), 1)
    alone = reading(without_memory(snapshot), each)  # parts have no memory instances
    snapshot = reading(snapshot, hosts_of(snapshot))
    if variant.has_lone_instances and suits_lone_instances(alone, each, cost_model, config):
        if is_alone(snapshot):  # all instances compute it sooner
            whole = without_memory(snapshot)
            plan = plan_part(whole, cost_model, config, len(whole.pools), variant)
            plan = with_borrowings(plan, whole) if ends_on_one(plan) else None
        plan = plan or plan_parts(alone, each, cost_model, config, variant)
    elif snapshot.num_hosts > 1 and len(parts := joined_hosts(snapshot)) > 1:
        plan = plan_parts(without_memory(snapshot), parts, cost_model, config, variant)
    is_enough = plan is not None and (plan.batches or plan.migrations or snapshot.is_anything_in_flight)
    if plan is not None and is_enough and not plan.preemptions:
        return plan  # otherwise one part has too little room for what it has, and all together may have it
    if has_memory:
        return plan_with_memory(snapshot, cost_model, config, variant)
    plan = plan_part(snapshot, cost_model, config, len(snapshot.pools), variant)
    return with_borrowings(plan, snapshot)
