"""KV of decodes on memory instances, where that has the better price (`memory_price.py`).

KV of leases is copied there while they run, the requests with most of it first: nothing waits for that. It
comes back in the same way, where there is room and reading it at home has the better price. Requests at rest
move only where nothing else would run, at any price.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.placement import InstanceId, OwnerId, Placement
from loong.core.plan import IterationPlan, KVMigration
from loong.core.positions import subtract
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cached_prefixes import computing, reading, with_borrowings
from loong.scheduler.common.cluster_parts import hosts_of
from loong.scheduler.common.leases import first_ends
from loong.scheduler.common.moving_kv import arrived_ends, is_movable, moved, piece_of_link
from loong.scheduler.common.shares import leveled
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.draft import Variant
from loong.scheduler.esp.memory_price import (
    NOBODY,
    LeasePrice,
    Move,
    Priced,
    newcomers_at,
    shared_out,
)
from loong.scheduler.esp.stages import is_any_usable, plan_part, plan_while_busy
from loong.scheduler.tuning import LEAST_FREE_SHARE, MOVED_TAIL

NO_ROOM = "{} tokens of its KV move to memory instances, as nothing else has room to go on"
OFFLOADED = "{} tokens of its KV move to memory instances, since decodes make more tokens with it there"
RETURNED = "{} tokens of its KV move back from memory instances, since decodes make more tokens with it here"


def plan_with_memory(
    snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig, variant: Variant
) -> IterationPlan:
    """Plan all instances together, since all read what memory instances have.

    A prompt reads no cached KV that leaves no room for the rest where nothing else would run.
    """
    if not is_any_usable(snapshot, snapshot.pools):
        return with_memory(plan_while_busy(snapshot), snapshot, cost_model, config)
    found = reading(snapshot, hosts_of(snapshot))
    plan = plan_part(found, cost_model, config, len(snapshot.pools), variant)
    plan = with_memory(with_borrowings(plan, found), snapshot, cost_model, config)
    is_stuck = not (plan.batches or plan.migrations or plan.preemptions or snapshot.is_anything_in_flight)
    if is_stuck and any(view.cached for view in snapshot.waiting):
        snapshot = replace(snapshot, waiting=tuple(map(computing, snapshot.waiting)))
        return plan_with_memory(snapshot, cost_model, config, variant)
    return plan


def with_memory(
    plan: IterationPlan, snapshot: Snapshot, cost_model: CostModel, config: PolicyConfig
) -> IterationPlan:
    """Return a plan with moves to memory instances, and the ends of leases whose KV has moved there.

    Nothing is preempted where moves make room.
    """
    if not snapshot.memory_free:
        return plan
    room = Counter({i: max(0, num_free) for i, num_free in snapshot.memory_free.items()})
    for batch in plan.batches:
        room.subtract({i: n for i, n in batch.num_stored_tokens.items() if i in room})
    priced = [*LeaseMoves(plan, snapshot, cost_model, config, room)]
    moves = [move for its in priced for move in _migrations(its.moves)]
    is_stuck = bool(plan.preemptions) or not (plan.batches or moves or snapshot.is_anything_in_flight)
    if is_stuck and (at_rest := list(_at_rest(plan, snapshot, cost_model, room))):
        others = tuple(d for d in plan.decisions if d.kind is not DecisionKind.PREEMPT)
        decisions = (*others, *_decisions(at_rest))
        plan, moves = replace(plan, preemptions=(), decisions=decisions), moves + at_rest
    ends = tuple(arrived_ends(snapshot))
    if not (moves or ends):
        return plan
    return replace(
        plan,
        migrations=(*plan.migrations, *moves),
        lease_ends=first_ends((*plan.lease_ends, *ends)),
        decisions=(*plan.decisions, *_reasons(priced, snapshot)),
    )


@dataclass(frozen=True)
class LeaseMoves:
    """The moves of KV that leases read, to memory instances with `room` or from there, as far as they pay.

    One round ends before the next begins.
    """

    plan: IterationPlan
    snapshot: Snapshot
    cost_model: CostModel
    config: PolicyConfig
    room: Counter[InstanceId]

    def __iter__(self) -> Iterator[Priced]:
        """Yield the moves of each batch that pay, and take their room."""
        if any(v.is_migrating for v in self.snapshot.running if v.batch_id in self.snapshot.batch):
            return
        for batch in self.snapshot.batches:
            price = LeasePrice(batch, self.snapshot, self.cost_model, self.config)
            views = [v for v in price.views if self._is_movable(v)]
            for instance_id in self.snapshot.pools if views else ():
                priced = self._offloaded(price, views, instance_id) or self._returned(
                    price, views, instance_id
                )
                if priced is not None:
                    moving = {move.view.request_id for move in priced.moves}
                    views = [view for view in views if view.request_id not in moving]
                    for move in priced.moves:
                        self.room.subtract(dict(move.shares))
                    yield priced

    def _offloaded(
        self, price: LeasePrice, views: Sequence[RequestView], instance_id: InstanceId
    ) -> Priced | None:
        """Return the moves of KV from an instance to memory instances that serve the batch, if they pay."""
        room = {i: n for i, n in self.room.items() if self._can_serve(i, price)}
        moves = list(shared_out(_with_most_on(instance_id, views), instance_id, room))
        if not moves:
            return None
        newcomers = NOBODY
        if self._num_spare(instance_id) < 0:
            decodes = [view for view in price.views if _num_on(view, instance_id)]
            newcomers = newcomers_at(self.snapshot, decodes, self._num_free(instance_id), self._busy_ids)
        best = price.best(moves, newcomers)
        if best is None and newcomers is not NOBODY and self._is_overbooked:
            return price.of(_covering(moves, -self._num_spare(instance_id)))
        return best

    @cached_property
    def _is_overbooked(self) -> bool:
        """Return whether requests have begun that do not all fit into full instances at their ends.

        They were admitted since serving more of them pays. So KV has to move, at any price.
        """
        begun = (view for view in self.snapshot.running if not view.has_ended)
        return sum([view.num_final_tokens for view in begun]) > sum(self.snapshot.pools.values())

    def _returned(
        self, price: LeasePrice, views: Sequence[RequestView], instance_id: InstanceId
    ) -> Priced | None:
        """Return the moves of KV to the only instance of a batch, with room for all, if they pay."""
        if price.batch.plan.group.instance_ids != (instance_id,) or self.snapshot.waiting:
            return None
        num_growing = sum([view.num_remaining_tokens for view in price.views])
        room = self._num_spare(instance_id) - num_growing
        moves = list(_coming_back(views, instance_id, self.snapshot.memory_pools, room))
        return price.best(moves) if moves else None

    def _can_serve(self, instance_id: InstanceId, price: LeasePrice) -> bool:
        is_serving = instance_id in price.batch.holder_ids
        return is_serving or self.snapshot.takes_lease(instance_id)

    def _is_movable(self, view: RequestView) -> bool:
        is_free = is_movable(view, self.snapshot.ending_ids) and not (view.borrowed or view.has_holes)
        return is_free and view.request_id not in self._moving_ids

    def _num_spare(self, instance_id: InstanceId) -> int:
        """Return the free slots beyond those that an instance keeps; less than 0 if it has too few."""
        kept = round(LEAST_FREE_SHARE * self.snapshot.pools[instance_id])
        return self._num_free(instance_id) - kept

    def _num_free(self, instance_id: InstanceId) -> int:
        return self.snapshot.free[instance_id] - self._planned[instance_id]

    @cached_property
    def _planned(self) -> Counter[InstanceId]:
        planned = Counter[InstanceId]()
        for batch in self.plan.batches:
            planned.update(batch.num_stored_tokens)
        return planned

    @cached_property
    def _busy_ids(self) -> frozenset[RequestId]:
        return frozenset(r for batch in self.plan.batches for r in batch.request_ids)

    @cached_property
    def _moving_ids(self) -> frozenset[RequestId]:
        return frozenset(m.segment.owner_id for m in self.plan.migrations)


def _at_rest(
    plan: IterationPlan, snapshot: Snapshot, cost_model: CostModel, room: Counter[InstanceId]
) -> Iterator[KVMigration]:
    """Yield moves of the KV of the request at rest that has most of its own on full instances.

    It moves in pieces, after each of which the request can go on.
    """
    busy_ids = {r for batch in plan.batches for r in batch.request_ids}
    busy_ids.update(m.segment.owner_id for m in plan.migrations)
    resting = [v for v in snapshot.running if v.is_plannable and v.request_id not in busy_ids]
    resting = [v for v in resting if v.request_id not in snapshot.ending_ids and not v.num_siblings]
    if not resting:
        return
    readers = Counter(part.owner_id for view in snapshot.running for part in view.borrowed)
    own = [_own_part(view, readers) for view in resting]
    largest = max(own, key=lambda v: sum(_num_on(v, i) for i in snapshot.pools))
    for instance_id in snapshot.pools:
        yield from _moved(largest, instance_id, room, cost_model)


def _moved(
    view: RequestView, source_id: InstanceId, room: Counter[InstanceId], cost_model: CostModel
) -> Iterator[KVMigration]:
    """Yield the moves of a piece of a request's KV to memory instances, equal parts if there is room."""
    piece = min(piece_of_link(cost_model, source_id, memory_id) for memory_id in room)
    num_tokens = min(piece, _num_on(view, source_id))
    shares = list(leveled(num_tokens, {i: max(0, n) for i, n in room.items()}))
    room.subtract(dict(shares))
    yield from moved(view, source_id, shares)


def _covering(moves: Sequence[Move], num_tokens: int) -> Sequence[Move]:
    """Return as many of the moves, from the first on, as have this number of tokens together, or all."""
    ends = accumulate(move.num_tokens for move in moves)
    return moves[: 1 + next((place for place, end in enumerate(ends) if end >= num_tokens), len(moves))]


def _coming_back(
    views: Iterable[RequestView], home_id: InstanceId, memory_ids: Iterable[InstanceId], room: int
) -> Iterator[Move]:
    """Yield the moves of all that views have on memory instances, those with least first, while it fits."""
    held = {view.request_id: {i: n for i in memory_ids if (n := _num_on(view, i))} for view in views}
    for view in sorted(views, key=lambda v: sum(held[v.request_id].values())):
        room -= sum(held[view.request_id].values())
        if room < 0:
            return
        yield from (Move(view, i, [(home_id, n)]) for i, n in held[view.request_id].items())


def _migrations(moves: Iterable[Move]) -> Iterator[KVMigration]:
    for move in moves:
        yield from moved(move.view, move.source_id, move.shares)


def _with_most_on(instance_id: InstanceId, views: Iterable[RequestView]) -> list[RequestView]:
    """Return the views whose KV on an instance is worth a move, those with most of it first."""
    found = [view for view in views if _num_on(view, instance_id) >= MOVED_TAIL]
    return sorted(found, key=lambda view: _num_on(view, instance_id), reverse=True)


def _own_part(view: RequestView, readers: Counter[OwnerId]) -> RequestView:
    """Return the request with the KV that it alone reads: the rest would be twice there if it moved."""
    shared = [part.placement for part in view.borrowed if readers[part.owner_id] > 1]
    if not shared:
        return view
    own = (
        segment._replace(positions=positions)
        for segment in view.placement.segments
        for positions in subtract(
            (segment.positions,),
            *chain.from_iterable(placement.on(segment.instance_id) for placement in shared),
        )
    )
    return replace(view, placement=Placement(tuple(own)))


def _num_on(view: RequestView, instance_id: InstanceId) -> int:
    return view.placement.tokens_by_instance().get(instance_id, 0)


def _reasons(priced: Iterable[Priced], snapshot: Snapshot) -> Iterator[Decision]:
    for its in priced:
        for move in its.moves:
            yield _decision(its, move, is_back=move.source_id not in snapshot.pools)


def _decision(priced: Priced, move: Move, *, is_back: bool) -> Decision:
    """Return the reason of a move, with the seconds of a step of its lease before and after."""
    alternatives = (
        Alternative("its KV stays", priced.kept_seconds),
        Alternative("its KV moves", priced.moved_seconds),
    )
    chosen = (RETURNED if is_back else OFFLOADED).format(move.num_tokens)
    return Decision(DecisionKind.MIGRATE, (move.view.request_id,), chosen, alternatives)


def _decisions(moves: Iterable[KVMigration]) -> Iterator[Decision]:
    tokens = Counter[str]()
    for move in moves:
        tokens[move.segment.owner_id] += len(move.segment.positions)
    for owner_id, num_tokens in tokens.items():
        yield Decision(DecisionKind.MIGRATE, (owner_id,), NO_ROOM.format(num_tokens))
