"""`esp` on groups that never change: the policies `esp-fixed-N`.

They keep the order, deadlines, deferral and chunks of `esp`, so the difference to `esp` is the value of
elasticity. A request stays in its group, and all instances of a group run each of its batches.
"""

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cached_prefixes import reading
from loong.scheduler.common.cluster_parts import groups_of
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.draft import Variant
from loong.scheduler.esp.parts import plan_parts
from loong.scheduler.esp.stages import is_any_usable, plan_while_busy

FIXED = Variant(has_apart=False, is_fixed=True)


def plan_esp_fixed(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, size: int
) -> IterationPlan:
    """Assign prompts to groups of `size` instances, and plan each group by itself."""
    if not is_any_usable(snapshot, snapshot.pools):
        return plan_while_busy(snapshot)
    parts = groups_of(tuple(sorted(snapshot.pools)), size)
    return plan_parts(reading(snapshot, parts), parts, cost_model, config, FIXED)
