"""The removal of memory instances whose KV leases read: it goes elsewhere in pieces, and no lease waits.

Room of another engine that is given back is one. The policy sees it as an instance that is full, so decodes
go on to read it. Where KV cannot leave so, the instance is emptied as any other (`draining.py`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.instance import InstanceKind
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import IterationPlan, KVMigration
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.draining import homes_of
from loong.scheduler.common.leases import first_ends
from loong.scheduler.common.moving_kv import arrived_ends, is_movable, piece_of_link
from loong.scheduler.common.room import Room
from loong.scheduler.common.shares import Share, filled

MOVED = "{} tokens of its KV move from instance {}, which is to leave, while it decodes"


@dataclass(frozen=True)
class LeavingMemory:
    """Memory instances that are to leave, and where the KV of each request there is to go."""

    snapshot: Snapshot
    leaving_ids: frozenset[InstanceId]
    shares: Mapping[RequestId, Sequence[Share]]

    @classmethod
    def of(cls, snapshot: Snapshot) -> "LeavingMemory | None":
        """Return the memory instances that are to leave; None if there are none, or their KV has to stop.

        It has to if choices share it, if a prefix cache has it too, or if it has gaps. It also has to
        without room for it and for all that live requests may still need.
        """
        leaving_ids = snapshot.draining_ids
        if not leaving_ids or not all(_is_memory(snapshot, i) for i in leaving_ids):
            return None
        views = [v for v in snapshot.running if not v.has_ended and _num_on(v, leaving_ids)]
        if not all(_can_leave(view, leaving_ids) for view in views):
            return None
        free = {**snapshot.free, **snapshot.memory_free}
        homes = homes_of(snapshot, snapshot.migrations, snapshot.pools)
        room = Room.left_by(((snapshot.request[r], home) for r, home in homes.items()), free)
        going = Counter[RequestId]()
        for segment in (m.segment for m in snapshot.migrations if m.segment.instance_id in leaving_ids):
            going[segment.owner_id] += len(segment.positions)
        shares = dict[RequestId, Sequence[Share]]()
        for view in views:
            num_left = _num_on(view, leaving_ids) - going[view.request_id]
            if view.is_migrating and view.request_id not in going:
                num_left = 0  # some has arrived, and its boundary, which is near, shows how much
            order = sorted(room.spare, key=lambda i: (i != homes.get(view.request_id), -room.spare[i], i))
            shares[view.request_id] = list(filled(num_left, {i: max(0, room.spare[i]) for i in order}))
            for instance_id, num_tokens in shares[view.request_id]:
                room.take(instance_id, num_tokens)
                num_left -= num_tokens
            if num_left:
                return None
        return cls(snapshot, leaving_ids, shares)

    @property
    def shown(self) -> Snapshot:
        """The snapshot for the policy: these instances are full, and the room for their KV is taken."""
        taken = Counter[InstanceId]()
        for shares in self.shares.values():
            taken.update(dict(shares))
        instances = [
            replace(i, is_draining=False, kv_capacity=i.kv_used, kv_cached=0)
            if i.instance_id in self.leaving_ids
            else replace(i, kv_capacity=i.kv_capacity - taken[i.instance_id])
            for i in self.snapshot.instances
        ]
        waiting = [
            replace(
                view, cached=tuple(c for c in view.cached if c.segment.instance_id not in self.leaving_ids)
            )
            for view in self.snapshot.waiting
        ]
        return replace(self.snapshot, instances=tuple(instances), waiting=tuple(waiting))

    def added_to(self, plan: IterationPlan, cost_model: CostModel) -> IterationPlan:
        """Return the plan with the next pieces of KV that go, and the ends of leases whose KV has gone.

        From an instance that is to leave, one piece at a time is on its way.
        """
        moves = list(self._pieces(plan, cost_model))
        ends = tuple(arrived_ends(self.snapshot))
        if not (moves or ends):
            return plan
        return replace(
            plan,
            migrations=(*plan.migrations, *moves),
            lease_ends=first_ends((*plan.lease_ends, *ends)),
            decisions=(*plan.decisions, *_decisions(moves)),
        )

    def _pieces(self, plan: IterationPlan, cost_model: CostModel) -> Iterator[KVMigration]:
        on_way = {m.segment.instance_id for m in (*self.snapshot.migrations, *plan.migrations)}
        for view in self._free_views(plan):
            segments = (s for s in view.placement.segments if s.instance_id in self.leaving_ids - on_way)
            if (segment := next(segments, None)) is None or not self.shares[view.request_id]:
                continue
            destination_id, num_room = self.shares[view.request_id][0]
            piece = piece_of_link(cost_model, segment.instance_id, destination_id)
            positions = segment.positions[: min(num_room, piece)]
            on_way.add(segment.instance_id)
            yield KVMigration(KVSegment(view.request_id, positions, segment.instance_id), destination_id)

    def _free_views(self, plan: IterationPlan) -> Iterator[RequestView]:
        """Yield the requests whose KV can begin to move, those with least of it first."""
        snapshot = self.snapshot
        busy_ids = {m.segment.owner_id for m in plan.migrations}
        busy_ids.update(eviction.segment.owner_id for eviction in plan.evictions)
        busy_ids.update(preemption.request_id for preemption in plan.preemptions)
        busy_ids.update(failure.request_id for failure in plan.failures)
        for extension in plan.lease_extensions:
            busy_ids.update(snapshot.batch[extension.batch_id].plan.request_ids)
        views = map(snapshot.request.__getitem__, self.shares)
        for view in sorted(views, key=lambda v: (_num_on(v, self.leaving_ids), v.request_id)):
            is_free = view.request_id not in busy_ids | snapshot.ending_ids
            if is_free and (view.is_plannable or is_movable(view, snapshot.ending_ids)):
                yield view


def _is_memory(snapshot: Snapshot, instance_id: InstanceId) -> bool:
    return snapshot.instance[instance_id].kind is InstanceKind.ATTENTION


def _num_on(view: RequestView, instance_ids: Iterable[InstanceId]) -> int:
    held = view.placement.tokens_by_instance()
    return sum(held.get(i, 0) for i in instance_ids)


def _can_leave(view: RequestView, leaving_ids: Iterable[InstanceId]) -> bool:
    """Return whether KV of a request can be copied while a batch reads it, whichever batch that is."""
    read_there = any(part.placement.on(i) for part in view.borrowed for i in leaving_ids)
    return not (view.num_siblings or view.has_holes or read_there)


def _decisions(moves: Iterable[KVMigration]) -> Iterator[Decision]:
    for segment in (move.segment for move in moves):
        chosen = MOVED.format(len(segment.positions), segment.instance_id)
        yield Decision(DecisionKind.MIGRATE, (segment.owner_id,), chosen)
