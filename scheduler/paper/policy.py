"""LoongServe as published (SOSP'24): the policy `esp-paper`.

On every event, waiting prompts are dispatched by (1) and (2), and get instances by (3) and (4). They are
batched by the program (5), and computed whole. Each prefill is scaled down to the fewest instances that hold
its KV. Decode batches are scaled up when slots run out or they become compute-bound. Requests that share
instances and are not in flight are one decode batch. So batches merge, and a group lasts only as long as its
requests need it.

Where the paper gives no rule, or a constant of its cluster, this policy does the following:

- The output length of a request is its declared maximum, and how long it decodes follows from the predicted
  time of a step. Times, tipping points and the speed of links come from the cost model.
- A step is compute-bound if it takes twice as long as one that only begins and reads the weights.
- The program is solved exactly, without the published pruning. Each group goes on at its own pace, and any
  instance that is free can be used.
- With nothing idle, and no decode batch worth stopping, the first prompt still gets instances whose KV has
  room on others. So decode batches give way to prompts of any length.
- A batch whose instances are not all free begins when they are. Leases on them end, and the free ones wait.
- A request that has lost KV with an instance is computed where its other KV is, before all others there.
- While a decode batch lacks slots, also with those of all batches not in flight, no prompt begins and all
  leases end. If no lease is left, the latest arrival is preempted.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, Preemption, PreemptionReason
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.future_kv import paper_weight
from loong.scheduler.common.leases import arrival_order, lease_ends, plan_lease
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.paper.allocation import Moves, PaperAllocation
from loong.scheduler.paper.batching_program import Demand, Offer, solve
from loong.scheduler.paper.cluster import DecodeBatch, PaperCluster
from loong.scheduler.paper.dispatch import dispatch
from loong.scheduler.paper.scaling import find_slots, prefill_batch, repair, scale_up


def plan_esp_paper(snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig) -> IterationPlan:
    """Plan every instance that is free."""
    cluster = PaperCluster.of(make_planning_view(snapshot), cost_model, config)
    repairs = [repair(cluster, instance_set) for instance_set in cluster.repairing]
    plan = _plan_others(cluster)
    leaving = [v for views in repairs if isinstance(views, list) for v in views]
    leaving = [v for v in leaving if v.request_id not in snapshot.ending_ids]
    return replace(
        plan,
        batches=(*plan.batches, *(batch for batch in repairs if isinstance(batch, BatchPlan))),
        preemptions=(
            *plan.preemptions,
            *(Preemption(view.request_id, PreemptionReason.REPAIR) for view in leaving),
        ),
    )


def _plan_others(cluster: PaperCluster) -> IterationPlan:
    """Plan all but the repairs, whose instances are not among the cluster's idle or decoding ones."""
    if not find_slots(cluster):
        return _make_slots(cluster)
    prompts, stopped = dispatch(cluster)
    allocation = PaperAllocation(cluster, prompts, stopped)
    allocation.allocate()
    prefills = _prefills(allocation)
    used = {i for instance_ids, _ in prefills for i in instance_ids}
    moves = {i: moved for i, moved in allocation.moves.items() if i in used}
    awaited = [b for b in cluster.decoding if not b.is_ready and not used.isdisjoint(b.instance_ids)]
    unready = cluster.emptying.union(moves, *(batch.instance_ids for batch in awaited))
    moving = tuple(move for i, moved in moves.items() if cluster.batch_on(i).is_ready for move in moved)
    for move in moving:
        cluster.free[move.destination_id] -= len(move.segment.positions)
    return IterationPlan(
        batches=(
            *(prefill_batch(cluster, ids, views) for ids, views in prefills if unready.isdisjoint(ids)),
            *_leases(cluster, used, moves),
        ),
        migrations=moving,
        lease_ends=lease_ends(lease for batch in awaited for lease in batch.leases),
        program_sizes=(len(allocation.prompts),) if allocation.prompts else (),
    )


def _prefills(allocation: PaperAllocation) -> list[tuple[list[InstanceId], list[RequestView]]]:
    """Return the instances and prompts of each prefill: the program over E_p by host and free slots."""
    cluster, free = allocation.cluster, allocation.free
    if not allocation.prompts:
        return []
    instances = cluster.planning_view.snapshot.instance
    instance_ids = sorted(free, key=lambda i: (instances[i].host_id, free[i], i))
    prompts = sorted(allocation.prompts, key=lambda view: (-view.num_uncomputed_tokens, view.request_id))
    demands = []
    for view in prompts:
        num_tokens = view.num_uncomputed_tokens
        demands.append(Demand(num_tokens, num_tokens, num_tokens**2, paper_weight(view.num_prompt_tokens)))
    solution = solve(
        demands,
        [Offer(1, max(0, free[i])) for i in instance_ids],
        [cluster.cost_model.prefill_terms(dop + 1) for dop in range(len(instance_ids))],
    )
    assert solution is not None, "all instances together have room for all prompts"
    return [(instance_ids[batch.offers], prompts[batch.demands]) for batch in solution.batches]


def _leases(
    cluster: PaperCluster, used: Collection[InstanceId], moves: Mapping[InstanceId, Moves]
) -> Iterator[BatchPlan]:
    """Yield the next lease of every decode batch, unless it stops for a prefill or has KV that moves."""
    idle = [i for i in cluster.idle if i not in used]
    for batch in cluster.decoding:
        if not batch.is_ready or any(i in used and i not in moves for i in batch.instance_ids):
            continue
        staying = _staying(batch, moves)
        if staying is batch:
            scale_up(cluster, batch, idle)
        free = {i: cluster.free[i] for i in staying.instance_ids}
        if staying.views:
            lease = plan_lease(free, staying.views, cluster.cost_model, cluster.config.lease_steps)
            if lease is not None:
                yield lease


def _staying(batch: DecodeBatch, moves: Mapping[InstanceId, Moves]) -> DecodeBatch:
    """Return the requests of a batch without moving KV, and their instances."""
    if moves.keys().isdisjoint(batch.instance_ids):
        return batch
    views = [view for view in batch.views if moves.keys().isdisjoint(view.placement.instance_ids)]
    return DecodeBatch(tuple(sorted({i for view in views for i in view.placement.instance_ids})), views)


def _make_slots(cluster: PaperCluster) -> IterationPlan:
    """End all leases; once nothing runs, preempt the latest arrival."""
    snapshot = cluster.planning_view.snapshot
    if snapshot.is_anything_in_flight:
        return IterationPlan(lease_ends=lease_ends(snapshot.batches))
    latest = max((view for batch in cluster.decoding for view in batch.views), key=arrival_order)
    return IterationPlan(preemptions=(Preemption(latest.request_id),))
