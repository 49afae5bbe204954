"""The next batch of a home: prompts alone, or a lease of decodes, which may read KV on other instances."""

from collections.abc import Mapping

from loong.core.cost.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.leases import plan_lease, timed_batch
from loong.scheduler.common.service import leased
from loong.scheduler.common.shares import dealt_out, filled
from loong.scheduler.common.striping import RequestPart, next_positions, whole_part
from loong.scheduler.infinite.homes import Home


def prompt_step(
    home: Home, homes: Mapping[InstanceId, Home], cost_model: CostModel, max_tokens: int
) -> BatchPlan | None:
    """Return a step of whole prompts: those that fit `max_tokens`, or the first; None if none has slots.

    A prompt that is spread is computed by itself, as much of it as the instance has room for.
    """
    views, parts = list[RequestView](), list[RequestPart]()
    spread_ids = {view.request_id for view in home.spread}
    num_left, num_free = max_tokens, home.num_free
    for view in home.prompts:
        num_tokens = view.num_uncomputed_tokens
        if view.request_id in spread_ids:
            part = None if views else _spread_chunk(view, home, homes)
            if part is not None:
                return timed_batch((home.instance_id,), [view], [part], cost_model)
        elif num_tokens <= num_free:
            if views and num_tokens > num_left:
                break
            num_left -= num_tokens
            num_free -= num_tokens
            views.append(view)
            parts.append(whole_part(view, num_tokens, home.instance_id))
    return timed_batch((home.instance_id,), views, parts, cost_model) if views else None


def lease(
    home: Home, snapshot: Snapshot, planned: Mapping[InstanceId, int], cost_model: CostModel, lease_steps: int
) -> BatchPlan | None:
    """Return a lease of its decodes, and of those that are spread within the room that nobody needs.

    It is one step where instances that serve it take no more leases; `planned` are those of this plan.
    """
    if home.is_waiting_for_moves:
        return None
    num_steps, spread = lease_steps, [view for view in home.spread if view.is_decoding]
    if spread:
        num_room = home.num_room
        spread = spread[:num_room]
        num_steps = min(lease_steps, num_room // max(1, len(spread)))
    views = home.group.decodes + spread
    if len(leased(snapshot, views, (home.instance_id,), planned)) < len(views):
        num_steps = 1
    return plan_lease(home.group.free, views, cost_model, max(1, num_steps)) if views else None


def use(batch: BatchPlan, home: Home, homes: Mapping[InstanceId, Home]) -> None:
    """Count the slots of a batch of `home` as used."""
    spread_ids = {view.request_id for view in home.spread}
    for instance_id, num_tokens in batch.num_reserved_tokens.items():
        homes[instance_id].group.free[instance_id] -= num_tokens
    for segment in batch.writes:
        if segment.owner_id in spread_ids:
            homes[segment.instance_id].group.capacity -= len(segment.positions)


def _spread_chunk(view: RequestView, home: Home, homes: Mapping[InstanceId, Home]) -> RequestPart | None:
    """Return the next chunk of a prompt. What will not fit at home is pushed, the oldest first.

    The newest token stays, so that the home remains the same. None if there is no room at home.
    """
    num_room = home.num_room
    if not num_room:
        return None
    others = [other for other in homes.values() if other is not home]
    others.sort(key=lambda other: (other.is_lent_room, -other.num_room, other.instance_id))
    rooms = {other.instance_id: other.num_room for other in others}
    num_tokens = min(view.num_uncomputed_tokens, home.num_free, num_room + sum(rooms.values()))
    num_pushed = max(0, min(view.num_tokens_to_come - num_room, num_tokens - 1, sum(rooms.values())))
    shares = (*filled(num_pushed, rooms), (home.instance_id, num_tokens - num_pushed))
    writes = tuple(dealt_out(view.request_id, next_positions(view, num_tokens), shares))
    return RequestPart(whole_part(view, num_tokens, home.instance_id).queries, writes)
