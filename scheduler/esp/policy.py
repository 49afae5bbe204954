"""Elastic sequence parallelism that keeps deadlines: the policy `esp`.

The instances of a batch, its group, are chosen anew at every chunk boundary:

- Where all prompts are short and targets loose, each instance runs its own requests. So it does where
  decodes that read KV of others would miss the TPOT target.
- Otherwise the last instances decode, as few as meet the TPOT target, each requests of its own. The others
  compute prompts in one group, and serve the KV that stays there. A context that one instance reads too
  slowly is decoded by that group, before it goes on with prompts.
- Where steps on all instances with decodes and prompts compute more prompts, they run together.

Several hosts are planned one by one. Those that a request needs together are planned together while it runs.
While hosts are joined, on GPUs every other request keeps its KV on one host, so that hosts can part again.
"""

from collections.abc import Iterable

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId, striped
from loong.core.plan import IterationPlan
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cached_prefixes import reading, with_borrowings
from loong.scheduler.common.cluster_parts import Parts, groups_of, hosts_of, place_of
from loong.scheduler.common.joined_hosts import joined_hosts
from loong.scheduler.common.leases import decode_seconds
from loong.scheduler.common.service import serves_all
from loong.scheduler.common.slo_targets import tightest_tpot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.draft import Variant
from loong.scheduler.esp.memory import plan_with_memory
from loong.scheduler.esp.memory_use import fits_elsewhere, needs_memory, without_memory
from loong.scheduler.esp.parts import plan_parts
from loong.scheduler.esp.prompt_order import by_arrival
from loong.scheduler.esp.stages import is_any_usable, plan_part, plan_while_busy
from loong.scheduler.tuning import PLANNED_TPOT_SHARE

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
        plan = plan_parts(alone, each, cost_model, config, variant)
        if _is_alone(snapshot):  # all instances compute it sooner
            together = plan_part(snapshot, cost_model, config, len(snapshot.pools), variant)
            plan = with_borrowings(together, snapshot) if _gathers_kv(together) else plan
    elif snapshot.num_hosts > 1 and len(parts := joined_hosts(snapshot)) > 1:
        plan = plan_parts(without_memory(snapshot), parts, cost_model, config, variant)
    is_enough = plan is not None and (plan.batches or plan.migrations or snapshot.is_anything_in_flight)
    if plan is not None and is_enough and not plan.preemptions:
        return plan  # otherwise one part has too little room for what it has, and all together may have it
    if has_memory:
        return plan_with_memory(snapshot, cost_model, config, variant)
    plan = plan_part(snapshot, cost_model, config, len(snapshot.pools), variant)
    return with_borrowings(plan, snapshot)


def live_requests(snapshot: Snapshot) -> list[RequestView]:
    """Return the requests that have not ended."""
    return [view for view in (*snapshot.waiting, *snapshot.running) if not view.has_ended]


def fit_parts(snapshot: Snapshot, parts: Parts) -> bool:
    """Return whether every request fits into the KV of each part."""
    return snapshot.most_tokens <= min(sum(snapshot.pools[i] for i in part) for part in parts)


def are_within_parts(views: Iterable[RequestView], parts: Parts) -> bool:
    """Return whether all KV of each request is in one part."""
    place = place_of(parts)
    places = ({place.get(i) for i in view.placement.instance_ids} for view in views)
    return all(len(found) <= 1 and None not in found for found in places)


def suits_lone_instances(
    snapshot: Snapshot, each: Parts, cost_model: CostModel, config: PolicyConfig
) -> bool:
    """Return whether each instance is to run requests by itself.

    Every request must fit into the KV of each. Unless instances serve any number of batches, all its KV must
    be on one of them. Each prompt must fit into a step of one, and TPOT targets must leave most of a step
    with decodes to prompts; or decodes must meet targets by KV of their own instance, but not by that of
    others.
    """
    live = live_requests(snapshot)
    if not fit_parts(snapshot, each) or not (serves_all(snapshot) or are_within_parts(live, each)):
        return False
    budget = PLANNED_TPOT_SHARE * tightest_tpot(live, config)
    alone = cost_model.prefill_terms(1)
    most_tokens = alone.max_tokens(config.step_time, 0)
    is_loose = alone.least <= budget / 2
    if is_loose and all(
        view.num_prompt_tokens <= most_tokens or view.is_decoding or _num_to_compute(view) <= most_tokens
        for view in live
    ):
        return True
    own, remote = (_decode_seconds(holder_id, cost_model) for holder_id in (0, 1))
    return own <= budget < remote


def _is_alone(snapshot: Snapshot) -> bool:
    """Return whether there is one request, and nothing runs."""
    return len(live_requests(snapshot)) == 1 and not snapshot.is_anything_in_flight


def _gathers_kv(plan: IterationPlan) -> bool:
    """Return whether all new KV is on one instance, where one that runs by itself can go on."""
    return len({segment.instance_id for batch in plan.batches for segment in batch.writes}) == 1


def _num_to_compute(view: RequestView) -> int:
    """Return the tokens of a prompt that one instance is to compute: all but those that it has."""
    return view.num_uncomputed_tokens if len(view.placement.instance_ids) == 1 else view.num_prompt_tokens


def _decode_seconds(holder_id: InstanceId, cost_model: CostModel) -> float:
    """Return the seconds of a decode step on instance 0 with a token of KV on this idle instance."""
    placement = striped("", range(1), (holder_id,))
    return decode_seconds((0,), (placement,), cost_model, are_holders_idle=True)
