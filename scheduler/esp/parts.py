"""A cluster in parts, each planned by itself; what they have in common is computed once."""

from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cached_prefixes import computing, with_borrowings
from loong.scheduler.common.cluster_parts import Parts, homes_of, split
from loong.scheduler.common.least_work import Assigned, assigned_places
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.common.prefix_copies import PrefixCopies, with_copies
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
    copies = PrefixCopies(snapshot, cost_model, parts) if variant.has_copies and snapshot.owners else None
    assigned = assigned_places(snapshot, waiting, parts, homes, ordering, copies)
    places, others = assigned.places, assigned.others
    snapshot = _as_assigned(snapshot, assigned, copies)
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
    reasons += reason_to_wait(assigned.copying, WaitReason.COPYING)
    plan = with_borrowings(replace(plan, decisions=(*plan.decisions, *reasons)), snapshot)
    return plan if copies is None else with_copies(plan, copies, assigned.copying)


def _as_assigned(snapshot: Snapshot, assigned: Assigned, copies: PrefixCopies | None) -> Snapshot:
    """Return the snapshot in which requests compute all of their prompts, or read copies, as assigned."""
    if not (assigned.computing_ids or assigned.copied):
        return snapshot

    def as_assigned(view: RequestView) -> RequestView:
        if view.request_id in assigned.computing_ids:
            return computing(view)
        place = assigned.copied.get(view.request_id)
        return view if place is None or copies is None else copies.reading_at(view, place)

    return replace(snapshot, waiting=tuple(map(as_assigned, snapshot.waiting)))


def _needs_stages(queue: PromptQueue, admission: Admission) -> bool:
    """Return whether a plan for these instances may be more than the reasons of an admission.

    Where an instance is alone, only admitted prompts and decodes not in flight change anything.
    """
    if queue.is_any_plannable:
        return True
    return bool(admission.prefills if queue.num_instances == 1 else queue.waiting)
