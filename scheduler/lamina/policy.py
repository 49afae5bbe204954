"""Attention offloading: the policy `lamina` (Lamina, 4 and 5).

Full instances compute prompts, whole and first come, first served, and push their KV to memory instances as
it is made. They compute the products of decodes, each requests of its own, and memory instances attend. KV
that decodes make stays at their home at first, and moves under a lease before that has too little room.
Prompts read what memory instances have of earlier ones.

Without memory instances it is `vllm-m`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, Preemption
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.baselines.fixed_groups import memory_in_use, one_per_instance
from loong.scheduler.baselines.fixed_policy import WHOLE_PROMPTS, plan_fixed_groups
from loong.scheduler.common.cached_prefixes import reading, with_borrowings
from loong.scheduler.common.cluster_parts import Parts
from loong.scheduler.common.leases import (
    arrival_order,
    first_ends,
    in_micro_batches,
    lease_ends,
    plan_lease,
    rotating,
    timed_batch,
)
from loong.scheduler.common.service import leased
from loong.scheduler.common.striping import RequestPart
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import KVForecast
from loong.scheduler.lamina.homes import Home, homes_of
from loong.scheduler.lamina.memory import Balance, MemoryRoom, by_sequence, moved_at_rest, moves, prompt_part
from loong.scheduler.tuning import MICRO_BATCHES

OFFLOADED = "{} tokens of its KV move from instance {} to memory instances"
NO_FULL: Parts = ((),)  # what prompts read of others: KV on memory instances alone
NO_ROOM = "the instances that are left have too little room for all, and it came last"


def plan_lamina(
    snapshot: Snapshot,
    cost_model: CostModel,
    config: PolicyConfig,
    balance: Balance = by_sequence,
    *,
    rotates: bool = False,
) -> IterationPlan:
    """Plan every idle instance: a step with prompts if it has any, else a lease. Then move KV.

    With `rotates`, all instances are to have one lease, whose micro-batches rotate over them.
    """
    if not snapshot.memory_free:
        return plan_fixed_groups(
            snapshot, cost_model, config, one_per_instance, WHOLE_PROMPTS, load=memory_in_use
        )
    snapshot = reading(snapshot, NO_FULL)
    homes, memory = homes_of(snapshot), MemoryRoom.of(snapshot, balance)
    _admit(snapshot, homes, config.max_num_batched_tokens)
    batches, moved, ends = list[BatchPlan](), list[KVMigration](), list[LeaseEnd]()
    served = Counter[InstanceId]()  # leases of this plan
    idle = list[Home]()
    for home in homes.values():
        if home.batch is not None:
            ends += lease_ends([home.batch]) if _is_waited_for(home, snapshot) else ()
        elif batch := _prompt_step(home, memory, cost_model, config.max_num_batched_tokens):
            batches.append(batch)
        else:
            idle.append(home)
    together = [idle] if rotates and len(idle) == len(homes) else [] if rotates else [[home] for home in idle]
    for place in together:
        if batch := _lease(place, snapshot, served, cost_model, config):
            batches.append(batch)
        else:
            moved += _made_room(place, memory)
    for home in homes.values():
        moved += moves(home, snapshot, memory)
    victims = () if batches or moved or snapshot.is_anything_in_flight else _latest(snapshot)
    plan = IterationPlan(
        batches=tuple(batches),
        migrations=tuple(moved),
        preemptions=tuple(Preemption(view.request_id) for view in victims),
        lease_ends=first_ends(ends),
        decisions=tuple(_decisions(moved, victims)),
    )
    return with_borrowings(plan, snapshot)


def _admit(snapshot: Snapshot, homes: Mapping[InstanceId, Home], max_tokens: int) -> None:
    """Give waiting requests homes, in their order, while memory instances have room until all ends.

    A home takes no more once `max_tokens` are to be computed there.
    """
    forecast = KVForecast(
        sum(snapshot.instance[i].kv_capacity for i in snapshot.memory_free), snapshot.running
    )
    for view in snapshot.waiting:
        open_homes = [home for home in homes.values() if home.num_joining_tokens < max_tokens]
        if view.is_migrating or view.has_ended:
            continue
        if not open_homes or not forecast.takes(view):
            return
        min(open_homes, key=lambda home: home.load).join(view)


def _is_waited_for(home: Home, snapshot: Snapshot) -> bool:
    """Return whether a lease is to end: for prompts or decodes at rest, or since KV has moved away."""
    moving_ids = {migration.segment.owner_id for migration in snapshot.migrations}
    has_moved = any(v.is_migrating and v.request_id not in moving_ids for v in home.computing)
    return bool(home.prompts or home.decodes or has_moved)


def _prompt_step(home: Home, memory: MemoryRoom, cost_model: CostModel, max_tokens: int) -> BatchPlan | None:
    """Return a step of whole prompts: those that fit `max_tokens`, or the first; None if none has room."""
    views, parts = list[RequestView](), list[RequestPart]()
    num_left = max_tokens
    for view in home.prompts:
        if views and view.num_uncomputed_tokens > num_left:
            break
        part = prompt_part(view, home, memory)
        if part is None:
            break
        num_left -= part.num_tokens
        views.append(view)
        parts.append(part)
    return timed_batch((home.instance_id,), views, parts, cost_model) if views else None


def _lease(
    homes: Sequence[Home],
    snapshot: Snapshot,
    served: Counter[InstanceId],
    cost_model: CostModel,
    config: PolicyConfig,
) -> BatchPlan | None:
    """Return a lease of all decodes of some homes that have slots, the oldest of each first.

    It is in micro-batches where that is faster, which rotate over several homes. It is one step where
    instances that serve it take no more leases; `served` are those of this plan.
    """
    views = [view for home in homes for view in home.decodes[: home.num_free]]
    if not views:
        return None
    free = {home.instance_id: home.num_free for home in homes}
    num_steps = config.lease_steps if len(leased(snapshot, views, tuple(free), served)) == len(views) else 1
    batch = plan_lease(free, views, cost_model, num_steps)
    if batch is None or batch.num_steps == 1:
        return batch
    served.update(batch.holder_ids(view.placement for view in views))
    usual = 1 if snapshot.instance[homes[0].instance_id].is_on_gpu else MICRO_BATCHES
    batch = in_micro_batches(batch, views, cost_model, config.max_micro_batches or usual)
    return batch if len(homes) == 1 else rotating(batch, views, cost_model)


def _made_room(homes: Sequence[Home], memory: MemoryRoom) -> Iterator[KVMigration]:
    """Yield the moves of the request with most KV on each home: nothing there has a slot to go on with."""
    for home in homes:
        if resting := (*home.prompts, *home.decodes):
            yield from moved_at_rest(max(resting, key=home.num_held), home, memory)


def _latest(snapshot: Snapshot) -> Sequence[RequestView]:
    """Return the last to come of the requests with KV, if there are several."""
    holders = [view for view in snapshot.running if view.is_plannable]
    return [max(holders, key=arrival_order)] if len(holders) > 1 else ()


def _decisions(moved: Sequence[KVMigration], victims: Sequence[RequestView]) -> Iterator[Decision]:
    tokens = Counter[tuple[str, InstanceId]]()
    for owner_id, positions, source_id in (move.segment for move in moved):
        tokens[owner_id, source_id] += len(positions)
    for (owner_id, source_id), num_tokens in tokens.items():
        yield Decision(DecisionKind.MIGRATE, (owner_id,), OFFLOADED.format(num_tokens, source_id))
    for view in victims:
        yield Decision(DecisionKind.PREEMPT, (view.request_id,), NO_ROOM)
