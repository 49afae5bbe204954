"""Parts of a cluster that share nothing, each planned as one group."""

from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cluster_parts import Parts, split
from loong.scheduler.common.least_work import assigned_places
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import Refusal
from loong.scheduler.esp.draft import Variant
from loong.scheduler.esp.reasons import reasons_while_busy
from loong.scheduler.esp.stages import is_any_usable, joined_plan, plan_group


def plan_parts(
    snapshot: Snapshot, parts: Parts, cost_model: CostModel, config: PolicyConfig, variant: Variant
) -> IterationPlan:
    """Assign each prompt to the part with least work, and plan each part as one group."""
    if not is_any_usable(snapshot):
        return IterationPlan(decisions=tuple(reasons_while_busy(snapshot)))
    found = make_planning_view(snapshot)
    assigned, others = assigned_places(found, parts, cost_model, config, variant.order)
    plan = joined_plan(
        plan_group(part, cost_model, config, len(snapshot.pools), variant)
        for part in split(snapshot, parts, assigned)
        if part.waiting or any(view.is_plannable for view in part.running)
    )
    if not others:
        return plan
    waiting_ids = tuple(view.request_id for view in others)
    refused = Decision(DecisionKind.WAIT, waiting_ids, Refusal.NOT_CONSIDERED.value)
    return replace(plan, decisions=(*plan.decisions, refused))
