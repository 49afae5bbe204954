"""Which late prompts rest while others have enough to do, and tie no instances together.

Instances that share a request at rest go together, and a long prompt takes several. One that is put off would
make one group of all instances for as long as it rests or waits, in which every decode costs every instance.
So it is only kept until others leave it something.
"""

from loong.core.cost_model import CostModel
from loong.core.request import RequestId
from loong.scheduler.allocation import LONG_STEPS
from loong.scheduler.config import PolicyConfig
from loong.scheduler.dispatch import Dispatched, Prefill, is_due
from loong.scheduler.survey import Survey

ENOUGH = 0.25  # of a step of all instances


def parked_ids(
    dispatched: Dispatched, survey: Survey, cost_model: CostModel, config: PolicyConfig
) -> frozenset[RequestId]:
    """The prompts that were put off, or have missed their target, and are on several instances or long.

    But not the oldest late one when its share of the time is due, and none if those that can be in time are
    little work.
    """
    late = [p for p in dispatched.prefills if p.is_late or p.is_missed]
    least_long = LONG_STEPS * config.max_step_time
    tying = {p.view.request_id for p in late if _dop(p) > 1 or p.work > least_long}
    if not tying:
        return frozenset()
    others = sum(p.work for p in dispatched.prefills if not (p.is_late or p.is_missed))
    if others < ENOUGH * survey.num_instances * config.max_step_time:
        return frozenset()
    oldest = min(late, key=lambda p: p.view.arrival_time)
    if is_due(oldest, max(1, _dop(oldest)), survey.snapshot.now, cost_model, config):
        tying.discard(oldest.view.request_id)
    return frozenset(tying)


def _dop(prefill: Prefill) -> int:
    return len(prefill.view.placement.instance_ids)
