"""`esp` with prefill and decode on fixed parts of the cluster: `esp-disaggregated-N`.

The first instances compute prompts as one fixed group, with the order, deadlines, deferral and chunks of
`esp`. KV of a computed prompt moves to the last instances (`handoff.py`), where each decodes by itself,
unless a request is on several. Arriving KV ends the lease there after its present step. If only one instance
is left, it does both.

Prompts read what is cached on the instances that compute them, where KV stays for others as it moves.
"""

from collections.abc import Mapping
from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan, LeaseEnd
from loong.core.snapshot import Snapshot
from loong.scheduler.baselines.disaggregated import roles
from loong.scheduler.baselines.esp_fixed import FIXED
from loong.scheduler.baselines.handoff import hand_off
from loong.scheduler.common.cached_prefixes import reading, with_borrowings
from loong.scheduler.common.cluster_parts import Parts, homes_of, split
from loong.scheduler.common.leases import lease_ends
from loong.scheduler.common.planning_view import InstanceSet, PlanningView, make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.stages import joined_plan, plan_part


def plan_esp_disaggregated(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, num_decode: int
) -> IterationPlan:
    """Plan the prefill part as a fixed group, migrations to the decode part, and its decodes."""
    prefill_ids, decode_ids = roles(tuple(sorted(snapshot.pools)), num_decode)
    parts = (prefill_ids, decode_ids) if decode_ids else (prefill_ids,)
    snapshot = reading(snapshot, (prefill_ids,))
    places = {view.request_id: 0 for view in snapshot.waiting} | homes_of(snapshot, parts)
    sources, *others = split(snapshot, parts, places)
    if not others:
        return with_borrowings(plan_part(sources, cost_model, config, len(prefill_ids), FIXED), snapshot)
    (destinations,) = others
    handoff = hand_off(snapshot, sources, destinations)
    decoding = handoff.come_to(destinations)
    found = make_planning_view(decoding)
    groups = _roomy_groups(found)
    plan = joined_plan(
        plan_part(part, cost_model, config, len(snapshot.pools), FIXED)
        for part in (handoff.left_by(sources), *split(decoding, groups, homes_of(decoding, groups)))
    )
    ends = {end.batch_id: end for end in plan.lease_ends} | _ends_for_arrived(found)
    plan = replace(
        plan,
        migrations=handoff.migrations,
        preemptions=plan.preemptions + handoff.preemptions,
        lease_ends=tuple(ends.values()),
        decisions=(*plan.decisions, *handoff.decisions),
    )
    return with_borrowings(plan, snapshot)


def parts_by_role(instance_ids: tuple[InstanceId, ...], num_decode: int) -> Parts:
    """Return the prefill and the decode part of some instances, which are ascending; one of one instance."""
    return tuple(filter(None, roles(instance_ids, num_decode)))


def max_tokens_of_parts(pools: Mapping[InstanceId, int], num_decode: int) -> int:
    """Return the most KV that one request may need: the smaller of the two parts' total pools."""
    return min(sum(pools[i] for i in part) for part in parts_by_role(tuple(sorted(pools)), num_decode))


def _roomy_groups(found: PlanningView) -> Parts:
    """Return the instances that decode together: as share a request, and more where these lack room."""

    def num_spare(instance_set: InstanceSet) -> int:
        num_free = sum(found.free[i] for i in instance_set.instance_ids)
        return num_free - sum(view.num_remaining_tokens for view in instance_set.decodes)

    left, groups = sorted(found.instance_sets, key=num_spare), list[tuple[InstanceId, ...]]()
    while left:
        first = left.pop(0)
        instance_ids, room = first.instance_ids, num_spare(first)
        while room < 0 and left:
            roomiest = left.pop()
            instance_ids += roomiest.instance_ids
            room += num_spare(roomiest)
        groups.append(tuple(sorted(instance_ids)))
    return tuple(groups)


def _ends_for_arrived(found: PlanningView) -> dict[int, LeaseEnd]:
    """Return ends, by batch, of the leases on instances where KV has arrived."""
    late = (
        batch for instance_set in found.occupied if instance_set.decodes for batch in instance_set.batches
    )
    return {end.batch_id: end for end in lease_ends(late)}
