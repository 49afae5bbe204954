"""Rules for instances that each run their own requests, and for one request on all of them."""

from collections.abc import Iterable

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId, striped
from loong.core.plan import IterationPlan
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cluster_parts import Parts, place_of
from loong.scheduler.common.leases import decode_seconds
from loong.scheduler.common.service import serves_all
from loong.scheduler.common.slo_targets import tightest_tpot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.tuning import PLANNED_TPOT_SHARE


def suits_lone_instances(
    snapshot: Snapshot, each: Parts, cost_model: CostModel, config: PolicyConfig
) -> bool:
    """Return whether each instance is to run requests by itself.

    Every request must fit into the KV of each. Unless instances serve any number of batches, all its KV must
    be on one of them. Each prompt must fit into a step of one, and TPOT targets must leave most of a step
    with decodes to prompts; or decodes must meet targets by KV of their own instance, but not by that of
    others.
    """
    live = _live(snapshot)
    if not _fit(snapshot, each) or not (serves_all(snapshot) or _are_within(live, each)):
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


def is_alone(snapshot: Snapshot) -> bool:
    """Return whether there is one request on one host, and nothing runs."""
    return snapshot.num_hosts == 1 and len(_live(snapshot)) == 1 and not snapshot.is_anything_in_flight


def ends_on_one(plan: IterationPlan) -> bool:
    """Return whether all new KV is on one instance, where one that runs by itself can go on."""
    return len({segment.instance_id for batch in plan.batches for segment in batch.writes}) == 1


def _num_to_compute(view: RequestView) -> int:
    """Return the tokens of a prompt that one instance is to compute: all but those that it has."""
    return view.num_uncomputed_tokens if len(view.placement.instance_ids) == 1 else view.num_prompt_tokens


def _decode_seconds(holder_id: InstanceId, cost_model: CostModel) -> float:
    """Return the seconds of a decode step on instance 0 with a token of KV on this idle instance."""
    placement = striped("", range(1), (holder_id,))
    return decode_seconds((0,), (placement,), cost_model, are_holders_idle=True)


def _live(snapshot: Snapshot) -> list[RequestView]:
    """Return the requests that have not ended."""
    return [view for view in (*snapshot.waiting, *snapshot.running) if not view.has_ended]


def _fit(snapshot: Snapshot, parts: Parts) -> bool:
    """Return whether every request fits into the KV of each part."""
    return snapshot.most_tokens <= min(sum(snapshot.pools[i] for i in part) for part in parts)


def _are_within(views: Iterable[RequestView], parts: Parts) -> bool:
    """Return whether all KV of each request is in one part."""
    place = place_of(parts)
    places = ({place.get(i) for i in view.placement.instance_ids} for view in views)
    return all(len(found) <= 1 and None not in found for found in places)
