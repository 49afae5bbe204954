"""Instances that plan alone, and lend each other room for KV: the policy `infinite` (Infinite-LLM).

Each instance computes the requests at home there. KV that others keep for it is attended where it is. A
prompt that is longer than an instance's room is computed at its home, and its oldest KV is pushed to others.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.leases import arrival_order, lease_ends
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.infinite.admission import admit
from loong.scheduler.infinite.homes import Home, homes_of
from loong.scheduler.infinite.lending import Lending
from loong.scheduler.infinite.steps import lease, prompt_step, use

LENT = "{} tokens of its KV move from instance {} to {}, so that a request that waits finds room"
NO_ROOM = "the instances that are left have too little room for all, and it came last"


def plan_infinite(snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig) -> IterationPlan:
    """Plan every idle instance: a step with prompts if it has any, else a lease. Then lend room."""
    found = make_planning_view(snapshot)
    homes, max_tokens = homes_of(found), config.max_num_batched_tokens
    refused = admit(found.waiting, homes, max_tokens)
    _find_room(tuple(homes.values()))
    batches, ends = list[BatchPlan](), list[LeaseEnd]()
    served = Counter[InstanceId]()  # leases of this plan
    for home in homes.values():
        if home.group.batches:
            ends += _lease_ends(home, snapshot)
            continue
        batch = prompt_step(home, homes, cost_model, max_tokens)
        batch = batch or lease(home, snapshot, served, cost_model, config.lease_steps)
        if batch is not None:
            use(batch, home, homes)
            if batch.num_steps > 1:
                served.update(_holder_ids(batch, snapshot))
            batches.append(batch)
    moves = Lending(homes, cost_model, refused, snapshot.ending_ids).moves()
    victims = () if batches or moves or snapshot.is_anything_in_flight else _latest(homes)
    return IterationPlan(
        batches=tuple(batches),
        migrations=moves,
        preemptions=tuple(Preemption(view.request_id) for view in victims),
        lease_ends=tuple(ends),
        decisions=tuple(_decisions(moves, victims)),
    )


def _find_room(homes: Sequence[Home]) -> None:
    """Move requests that are spread from homes without room to those with most. Their KV stays."""
    for home in homes:
        while home.spread and not home.num_room:
            roomiest = max(homes, key=lambda other: (other.num_room, -other.instance_id))
            if not roomiest.num_room:
                return
            roomiest.spread.append(home.spread.pop(0))


def _lease_ends(home: Home, snapshot: Snapshot) -> Sequence[LeaseEnd]:
    """Return the end of a lease if a prompt has slots after it, or KV has moved and is freed by it."""
    num_free = home.num_free_at_boundary
    spread_ids = {view.request_id for view in home.spread}
    has_prompt = any(
        view.request_id in spread_ids or view.num_uncomputed_tokens <= num_free for view in home.prompts
    )
    moving_ids = {migration.segment.owner_id for migration in snapshot.migrations}
    in_flight = (h.view for h in home.residents if h.view.batch_id is not None)
    has_moved = any(view.is_migrating and view.request_id not in moving_ids for view in in_flight)
    return lease_ends(home.group.batches) if has_prompt or has_moved else ()


def _holder_ids(batch: BatchPlan, snapshot: Snapshot) -> Sequence[InstanceId]:
    return batch.holder_ids([snapshot.request[request_id].placement for request_id in batch.request_ids])


def _latest(homes: Mapping[InstanceId, Home]) -> Sequence[RequestView]:
    """Return the last to come of the requests with KV. One alone has room, and moves make some."""
    holders = [h.view for home in homes.values() for h in home.residents]
    if len(holders) < 2 or any(view.is_migrating for view in holders):
        return ()
    return [max(holders, key=arrival_order)]


def _decisions(moves: Sequence[KVMigration], victims: Sequence[RequestView]) -> Iterator[Decision]:
    for move in moves:
        owner_id, positions, source_id = move.segment
        reason = LENT.format(len(positions), source_id, move.destination_id)
        yield Decision(DecisionKind.MIGRATE, (owner_id,), reason)
    for view in victims:
        yield Decision(DecisionKind.PREEMPT, (view.request_id,), NO_ROOM)
