"""Snapshots of instances that lend each other room, and the plans of their policies."""

from dataclasses import replace

from snapshots import decoding, running

from loong.core.check_plan import check_plan
from loong.core.cost.cost_model import CostModel
from loong.core.placement import KVSegment, Placement
from loong.core.plan import IterationPlan
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.leases import timed_batch
from loong.scheduler.common.striping import decode_part
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import WorkCostModel
from loong.scheduler.policy import make_policy

COST_MODEL = WorkCostModel()


def plan_of(policy: str, snapshot: Snapshot, cost_model: CostModel = COST_MODEL) -> IterationPlan:
    """Return the plan of a policy, which keeps the rules."""
    plan = make_policy(policy, PolicyConfig())(snapshot, cost_model)
    check_plan(snapshot, plan)
    return plan


def held(request_id: str, *runs: tuple[int, int], max_tokens: int = 60) -> RequestView:
    """Return a decode whose KV is in runs, each an instance and its number of tokens, oldest first."""
    segments, first = list[KVSegment](), 0
    for instance_id, num_tokens in runs:
        segments.append(KVSegment(request_id, range(first, first + num_tokens), instance_id))
        first += num_tokens
    return replace(decoding(request_id, first, (0,), max_tokens), placement=Placement(tuple(segments)))


def leased(batch_id: int, instance_id: int, *views: RequestView, num_steps: int = 16) -> RunningBatch:
    """Return a lease of these decodes on one instance, in flight."""
    parts = [decode_part(view, instance_id, num_steps) for view in views]
    return running(batch_id, timed_batch((instance_id,), views, parts, COST_MODEL, num_steps))
