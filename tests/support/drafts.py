"""Drafts of plans for tests of their stages."""

from loong.core.cost.cost_model import CostModel
from loong.core.snapshot import Snapshot
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import admit
from loong.scheduler.esp.draft import PlanDraft, Variant
from loong.scheduler.esp.prompt_order import Ordering


def admitted_draft(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, variant: Variant | None = None
) -> PlanDraft:
    """Return the draft of a whole cluster with the prompts that are admitted."""
    view, variant = make_planning_view(snapshot), variant or Variant()
    ordering = Ordering.of(variant.order, view.num_instances, cost_model, config)
    admission = admit(view.queue, ordering)
    return PlanDraft(
        view, cost_model, config, variant, ordering, admission.prefills, decisions=admission.decisions
    )
