"""The choice of deferred prompts that are paused while others have enough work.

Instances that share a request not in flight are planned together, and a long prompt takes several. A waiting
deferred prompt would join all its instances into one group, in which every decode costs every instance. So it
is paused, with its KV, until the other prompts leave time for it.
"""

from loong.core.cost.cost_model import CostModel
from loong.core.request import RequestId
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import AdmissionDecision, PrefillCandidate, is_share_due
from loong.scheduler.tuning import LONG_PROMPT_STEPS, MIN_ON_TIME_SHARE


def deferred_ids_to_pause(
    admission: AdmissionDecision, planning_view: PlanningView, cost_model: CostModel, config: PolicyConfig
) -> frozenset[RequestId]:
    """Return the prompts to pause: deferred or past their target, and long or on several instances.

    The oldest one is left out when its share of the time is due. None is paused if the prompts that can be in
    time are little work.
    """
    not_on_time = [p for p in admission.prefills if p.is_deferred or p.missed_deadline]
    least_long = LONG_PROMPT_STEPS * config.step_time
    tying = {p.view.request_id for p in not_on_time if _dop(p) > 1 or p.work > least_long}
    if not tying:
        return frozenset()
    others = sum(p.work for p in admission.prefills if not (p.is_deferred or p.missed_deadline))
    if others < MIN_ON_TIME_SHARE * planning_view.num_instances * config.step_time:
        return frozenset()
    oldest = min(not_on_time, key=lambda p: p.view.arrival_time)
    if is_share_due(oldest, max(1, _dop(oldest)), planning_view.snapshot.now, cost_model, config):
        tying.discard(oldest.view.request_id)
    return frozenset(tying)


def _dop(prefill: PrefillCandidate) -> int:
    return len(prefill.view.placement.instance_ids)
