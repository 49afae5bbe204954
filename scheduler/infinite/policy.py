"""Instances that plan alone, and lend each other room for KV: `infinite`, `infinite-paper` and `distkv`.

Each instance computes the requests at home there. KV that others keep for it is attended where it is. A
prompt that is longer than an instance's room is computed at its home, and its oldest KV is pushed to others.
The three differ in their rule: the KV that moves.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, LeaseEnd, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.leases import arrival_order, first_ends, lease_ends
from loong.scheduler.common.planning_view import make_planning_view
from loong.scheduler.config import PolicyConfig
from loong.scheduler.infinite.admission import admit
from loong.scheduler.infinite.homes import Home, homes_of
from loong.scheduler.infinite.lending import Lending, Loans, make_room
from loong.scheduler.infinite.pace import paced
from loong.scheduler.infinite.steps import lease, prompt_step, use

NO_ROOM = "the instances that are left have too little room for all, and it came last"


Rule: TypeAlias = Callable[[Lending], Loans]
"""Returns the KV that moves."""


def plan_infinite(
    snapshot: Snapshot,
    cost_model: CostModel,
    config: PolicyConfig,
    *,
    rule: Rule = make_room,
    is_paced: bool = False,
) -> IterationPlan:
    """Plan every idle instance: a step with prompts if it has any, else a lease. Then lend room.

    Paced moves go on under the steps of a lease, which ends once they are due.
    """
    found = make_planning_view(snapshot)
    homes, max_tokens = homes_of(found), config.max_num_batched_tokens
    refused = admit(found.waiting, homes, max_tokens)
    _find_room(tuple(homes.values()))
    batches, ends = list[BatchPlan](), list[LeaseEnd]()
    served = Counter[InstanceId]()  # leases of this plan
    for home in homes.values():
        if home.group.batches:
            ends += _lease_ends(home, snapshot, is_paced)
            continue
        batch = prompt_step(home, homes, cost_model, max_tokens)
        batch = batch or lease(home, snapshot, served, cost_model, config.lease_steps)
        if batch is not None:
            use(batch, home, homes)
            if batch.num_steps > 1:
                served.update(_holder_ids(batch, snapshot))
            batches.append(batch)
    joining = {view.request_id for home in homes.values() for view in (*home.group.joining, *home.spread)}
    waiting = [view for view in found.waiting if view.request_id not in joining]
    loans = rule(Lending(homes, cost_model, refused, waiting, snapshot.ending_ids))
    if is_paced and loans:
        loans, due = paced(loans, snapshot)
        ends = list(first_ends((*ends, *due)))
    victims = () if batches or loans or snapshot.is_anything_in_flight else _latest(homes)
    return IterationPlan(
        batches=tuple(batches),
        migrations=tuple(loan.migration for loan in loans),
        preemptions=tuple(Preemption(view.request_id) for view in victims),
        lease_ends=tuple(ends),
        decisions=tuple(_decisions(loans, victims)),
    )


def _find_room(homes: Sequence[Home]) -> None:
    """Move requests that are spread from homes without room to those with most. Their KV stays."""
    for home in homes:
        while home.spread and not home.num_room:
            roomiest = max(homes, key=lambda other: (other.num_room, -other.instance_id))
            if not roomiest.num_room:
                return
            roomiest.spread.append(home.spread.pop(0))


def _lease_ends(home: Home, snapshot: Snapshot, is_paced: bool) -> Sequence[LeaseEnd]:
    """Return the end of a lease if a prompt has slots after it, or KV has moved and is freed by it.

    Where moves are paced it has its end already, unless it is about to be extended.
    """
    num_free = home.num_free_at_boundary
    spread_ids = {view.request_id for view in home.spread}
    has_prompt = any(
        view.request_id in spread_ids or view.num_uncomputed_tokens <= num_free for view in home.prompts
    )
    moving_ids = {migration.segment.owner_id for migration in snapshot.migrations}
    in_flight = (h.view for h in home.residents if h.view.batch_id is not None)
    has_moved = any(view.is_migrating and view.request_id not in moving_ids for view in in_flight)
    if is_paced:
        has_moved = has_moved and any(batch.is_ending for batch in home.group.batches)
    return lease_ends(home.group.batches) if has_prompt or has_moved else ()


def _holder_ids(batch: BatchPlan, snapshot: Snapshot) -> Sequence[InstanceId]:
    return batch.holder_ids([snapshot.request[request_id].placement for request_id in batch.request_ids])


def _latest(homes: Mapping[InstanceId, Home]) -> Sequence[RequestView]:
    """Return the last to come of the requests with KV. One alone has room, and moves make some."""
    holders = [h.view for home in homes.values() for h in home.residents]
    if len(holders) < 2 or any(view.is_migrating for view in holders):
        return ()
    return [max(holders, key=arrival_order)]


def _decisions(loans: Loans, victims: Sequence[RequestView]) -> Iterator[Decision]:
    for loan in loans:
        yield Decision(DecisionKind.LEND, (loan.migration.segment.owner_id,), loan.reason)
    for view in victims:
        yield Decision(DecisionKind.PREEMPT, (view.request_id,), NO_ROOM)
