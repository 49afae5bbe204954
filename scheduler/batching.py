"""From cells to a plan: chunk sizes, masters, leases, and where new KV stays."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from loong.core.cost_model import CostModel
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, LeaseEnd, Transfer
from loong.core.request import RequestId, RequestView
from loong.core.work import step_work
from loong.scheduler.cell import Cell, arrival_order, num_wished_tokens
from loong.scheduler.config import PolicyConfig
from loong.scheduler.striping import (
    Share,
    batch_of,
    decode_share,
    retained_share,
    striped_share,
    whole_share,
)

FreeSlots: TypeAlias = Mapping[InstanceId, int]
Retention: TypeAlias = Callable[[RequestView, FreeSlots, int], FreeSlots]
"""Which instances keep a request's new KV: of the free slots of a group, those to be used (and the lease)."""


def keep_on_all(_view: RequestView, free: FreeSlots, _lease_steps: int) -> FreeSlots:
    """Every instance of the group keeps some: static sequence parallelism."""
    return free


def keep_on_fewest(view: RequestView, free: FreeSlots, lease_steps: int) -> FreeSlots:
    """Proactive scale-down: the fewest instances that have room for the whole prompt and a lease.

    Those that hold KV of the request already come first, then those with most room.
    """
    holders = view.placement.instance_ids
    kept: dict[InstanceId, int] = {}
    for instance_id in sorted(free, key=lambda i: (i not in holders, -free[i], i)):
        if sum(kept.values()) >= num_wished_tokens(view, lease_steps):
            break
        kept[instance_id] = free[instance_id]
    return kept


def plan_batch(cell: Cell, cost_model: CostModel, config: PolicyConfig, retention: Retention) -> BatchPlan:
    """The batch of a ready cell: a lease if all its requests decode, else chunks and one token a decode."""
    decoding = [view for view in cell.views if view.is_decoding]
    if len(decoding) == len(cell.views):
        return _plan_lease(cell, decoding, config)
    masters = choose_masters(decoding, cell.free, num_steps=1)
    assert masters is not None, "a ready cell has a slot for each"
    shares = [decode_share(view, masters[view.request_id]) for view in decoding]
    free = _subtract(cell.free, shares)
    budget = max(1, config.max_num_batched_tokens * cell.dop - len(decoding))
    prefilling = [view for view in cell.views if not view.is_decoding]
    for view, num_tokens in chunk_sizes(prefilling, budget):
        share = chunk_share(view, num_tokens, free, retention(view, free, config.lease_steps), cost_model)
        free = _subtract(free, [share])
        shares.append(share)
    return batch_of(cell.group, shares)


def chunk_sizes(views: Sequence[RequestView], budget: int) -> list[tuple[RequestView, int]]:
    """How many tokens each prefill computes in a step of `budget` tokens; those with none are left out.

    Half of the budget, and what the others leave, is the oldest request's, so that none starves. The rest
    goes to short prompts first, so that they do not wait for long ones.
    """
    oldest = min(views, key=arrival_order)
    left = budget - min(oldest.num_uncomputed_tokens, -(-budget // 2))
    sizes = []
    others = (view for view in views if view is not oldest)
    for view in sorted(others, key=lambda view: (view.num_uncomputed_tokens, arrival_order(view))):
        num_tokens = min(left, view.num_uncomputed_tokens)
        left -= num_tokens
        sizes.append((view, num_tokens))
    used = sum(num_tokens for _, num_tokens in sizes)
    sizes.insert(0, (oldest, min(oldest.num_uncomputed_tokens, budget - used)))
    return [(view, num_tokens) for view, num_tokens in sizes if num_tokens]


def chunk_share(
    view: RequestView, num_tokens: int, free: FreeSlots, kept: FreeSlots, cost_model: CostModel
) -> Share:
    """The quickest way to compute a chunk on all of `free` so that its KV stays on `kept`."""
    group = ESPGroup(tuple(sorted(free)))
    candidates = []
    if len(kept) == 1:
        candidates.append(whole_share(view, num_tokens, next(iter(kept))))
    if group.dop > 1:
        candidates += _striped_shares(view, num_tokens, group, kept)
    placements = {view.request_id: view.placement}
    return min(
        candidates, key=lambda share: cost_model.step_time(step_work(batch_of(group, [share]), placements))
    )


def _striped_shares(view: RequestView, num_tokens: int, group: ESPGroup, kept: FreeSlots) -> list[Share]:
    in_place = [striped_share(view, num_tokens, group, transfer) for transfer in Transfer]
    if all(len(segment.positions) <= kept.get(segment.instance_id, 0) for segment in in_place[0].writes):
        return in_place
    return [retained_share(view, num_tokens, group, kept)]


def choose_masters(
    views: Iterable[RequestView], free: FreeSlots, num_steps: int
) -> dict[RequestId, InstanceId] | None:
    """A master with room for `num_steps` tokens for each decoding request; None if there is none for one.

    Instances that hold KV of the request already come first, which keeps groups small; then those that
    are master of fewer.
    """
    room, num_requests = dict(free), Counter[InstanceId]()
    masters = {}
    for view in views:
        num_tokens = min(num_steps, view.num_remaining_tokens)
        roomy = [i for i in room if room[i] >= num_tokens]
        if not roomy:
            return None
        held = view.placement.tokens_by_instance()
        master_id = min(roomy, key=lambda i: (i not in held, num_requests[i], -room[i], i))
        masters[view.request_id] = master_id
        room[master_id] -= num_tokens
        num_requests[master_id] += 1
    return masters


def lease_ends(cells: Iterable[Cell]) -> tuple[LeaseEnd, ...]:
    """The leases that requests at rest wait for end after the step that runs now."""
    return tuple(
        LeaseEnd(batch.batch_id, batch.num_steps_taken + 1)
        for cell in cells
        if cell.views
        for batch in cell.batches
        if batch.num_steps_taken + 1 < batch.last_step
    )


def _plan_lease(cell: Cell, views: Sequence[RequestView], config: PolicyConfig) -> BatchPlan:
    num_steps = min(config.lease_steps, max(view.num_remaining_tokens for view in views))
    while (masters := choose_masters(views, cell.free, num_steps)) is None:
        num_steps //= 2
        assert num_steps, "a ready cell has a slot for each"
    shares = [decode_share(view, masters[view.request_id], num_steps) for view in views]
    return batch_of(cell.group, shares, num_steps)


def _subtract(free: FreeSlots, shares: Iterable[Share]) -> dict[InstanceId, int]:
    left = dict(free)
    for share in shares:
        for segment in share.writes:
            left[segment.instance_id] -= len(segment.positions)
    return left
