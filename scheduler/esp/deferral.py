"""Which deferred prompts are paused while others have enough to do, and tie no instances together.

Instances that share a request not in flight go together, and a long prompt takes several. One that is
deferred would make one group of all instances for as long as it is paused or waits, in which every decode
costs every instance. So it is only kept until others leave it something.
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
    """The prompts that were deferred, or have missed their target, and are on several instances or long.

    But not the oldest deferred one when its share of the time is due, and none if those that can be in time
    are little work.
    """
    not_on_time = [p for p in admission.prefills if p.is_deferred or p.missed_deadline]
    least_long = LONG_PROMPT_STEPS * config.max_step_time
    tying = {p.view.request_id for p in not_on_time if _dop(p) > 1 or p.work > least_long}
    if not tying:
        return frozenset()
    others = sum(p.work for p in admission.prefills if not (p.is_deferred or p.missed_deadline))
    if others < MIN_ON_TIME_SHARE * planning_view.num_instances * config.max_step_time:
        return frozenset()
    oldest = min(not_on_time, key=lambda p: p.view.arrival_time)
    if is_share_due(oldest, max(1, _dop(oldest)), planning_view.snapshot.now, cost_model, config):
        tying.discard(oldest.view.request_id)
    return frozenset(tying)


def _dop(prefill: PrefillCandidate) -> int:
    return len(prefill.view.placement.instance_ids)
