"""Parts of a cluster that share nothing, each planned by itself."""

from collections import defaultdict
from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cluster_parts import Parts, homes_of, split
from loong.scheduler.common.least_work import assigned_places
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import Refusal
from loong.scheduler.esp.draft import Variant
from loong.scheduler.esp.reasons import reason_to_wait, reasons_while_busy
from loong.scheduler.esp.stages import (
    Stage,
    build_in_one_group,
    is_any_usable,
    joined_plan,
    plan_part,
)


def plan_parts(
    snapshot: Snapshot,
    parts: Parts,
    cost_model: CostModel,
    config: PolicyConfig,
    variant: Variant,
    build: Stage = build_in_one_group,
) -> IterationPlan:
    """Assign each prompt to the part with least work, and plan each usable part with `build`."""
    found, homes = make_planning_view(snapshot), homes_of(snapshot, parts)
    places, others = assigned_places(found, parts, homes, cost_model, config, variant.order)
    usable = [place for place, part in enumerate(parts) if is_any_usable(snapshot, part)]
    number_of = {place: number for number, place in enumerate(usable)}
    usable_places = {r: number_of[place] for r, place in places.items() if place in number_of}
    plan = joined_plan(
        plan_part(part, cost_model, config, len(snapshot.pools), variant, build)
        for part in split(snapshot, tuple(parts[place] for place in usable), usable_places)
        if part.waiting or any(view.is_plannable for view in part.running)
    )
    busy: defaultdict[int, list[RequestView]] = defaultdict(list)
    for view in snapshot.waiting:
        place = places.get(view.request_id)
        if place is not None and place not in number_of:
            busy[place].append(view)
    decisions = [
        reason
        for place, views in busy.items()
        for reason in reasons_while_busy(snapshot, views, parts[place])
    ]
    if others:
        others_ids = (view.request_id for view in others)
        decisions.append(reason_to_wait(others_ids, Refusal.NOT_CONSIDERED.value))
    return replace(plan, decisions=(*plan.decisions, *decisions))
