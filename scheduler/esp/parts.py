"""A cluster in parts, each planned by itself; what they have in common is computed once."""

from collections.abc import Collection
from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cached_prefixes import computing, with_borrowings
from loong.scheduler.common.cluster_parts import Parts, homes_of, split
from loong.scheduler.common.least_work import assigned_places
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.common.prompt_queue import PromptQueue, queues_of
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import Admission, admit
from loong.scheduler.esp.draft import PlanDraft, Variant
from loong.scheduler.esp.prompt_order import Ordering
from loong.scheduler.esp.reasons import WaitReason, reason_to_wait, reasons_while_busy
from loong.scheduler.esp.stages import is_any_usable, joined_plan, plan_admitted


def plan_parts(
    snapshot: Snapshot, parts: Parts, cost_model: CostModel, config: PolicyConfig, variant: Variant
) -> IterationPlan:
    """Assign each prompt to the part with least work, and plan each usable part by itself."""
    ordering = Ordering.of(variant.order, len(snapshot.pools), cost_model, config)
    waiting, homes = make_planning_view(snapshot).waiting, homes_of(snapshot, parts)
    assigned = assigned_places(snapshot, waiting, parts, homes, ordering)
    places, others = assigned.places, assigned.others
    snapshot = _computing(snapshot, assigned.computing_ids)
    queues = queues_of(snapshot, parts, places)
    usable = [place for place in sorted(queues) if is_any_usable(snapshot, parts[place])]
    admissions = {place: admit(queues[place], ordering) for place in usable}
    staged = [place for place in usable if _needs_stages(queues[place], admissions[place])]
    numbers = {view.request_id: n for n, place in enumerate(staged) for view in queues[place].requests}
    snapshots = dict(zip(staged, split(snapshot, tuple(parts[p] for p in staged), numbers), strict=True))

    def plan_of(place: int) -> IterationPlan:
        if place not in snapshots:
            return IterationPlan(decisions=admissions[place].decisions)
        view = make_planning_view(snapshots[place])
        return plan_admitted(PlanDraft(view, cost_model, config, variant, ordering), admissions[place])

    plan = joined_plan(map(plan_of, usable))
    busy = [place for place in queues if place not in admissions]
    reasons = [r for p in busy for r in reasons_while_busy(snapshot, queues[p].waiting, parts[p])]
    reasons += reason_to_wait((view.request_id for view in others), WaitReason.NOT_CONSIDERED)
    return with_borrowings(replace(plan, decisions=(*plan.decisions, *reasons)), snapshot)


def _computing(snapshot: Snapshot, request_ids: Collection[RequestId]) -> Snapshot:
    """Return the snapshot in which these requests compute all of their prompts."""
    if not request_ids:
        return snapshot
    views = [computing(v) if v.request_id in request_ids else v for v in snapshot.waiting]
    return replace(snapshot, waiting=tuple(views))


def _needs_stages(queue: PromptQueue, admission: Admission) -> bool:
    """Return whether a plan for these instances may be more than the reasons of an admission.

    Where an instance is alone, only admitted prompts and decodes not in flight change anything.
    """
    if queue.is_any_plannable:
        return True
    return bool(admission.prefills if queue.num_instances == 1 else queue.waiting)
