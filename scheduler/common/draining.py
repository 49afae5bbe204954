"""The removal of instances under any policy: their KV goes elsewhere, and the policy does not see them.

Batches on a draining instance end at their next boundary. Then the KV of their requests there moves to an
instance with room, or is dropped and computed again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from loong.core.decision import Decision, DecisionKind
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, Preemption
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.leases import arrival_order, lease_ends

MOVED = "its KV moves from instance {}, which is to leave"
DROPPED = "instance {} is to leave, and no other has room for its KV"
ENDED = "instance {} is to leave"


@dataclass(frozen=True, slots=True)
class Draining:
    """The draining instances of a snapshot, and the requests and batches that have a part in them."""

    snapshot: Snapshot
    draining_ids: frozenset[InstanceId]
    batch_ids: frozenset[int]
    request_ids: frozenset[RequestId]

    @classmethod
    def of(cls, snapshot: Snapshot) -> "Draining | None":
        """Return what drains, or None if nothing does."""
        draining_ids = snapshot.draining_ids
        if not draining_ids:
            return None
        batches = [b for b in _in_flight(snapshot) if not draining_ids.isdisjoint(b.participant_ids)]
        request_ids = {request_id for batch in batches for request_id in batch.plan.request_ids}
        request_ids.update(v.request_id for v in snapshot.running if _holders(v, draining_ids))
        return cls(snapshot, draining_ids, frozenset(b.batch_id for b in batches), frozenset(request_ids))

    def plan(self) -> IterationPlan:
        """Return the ends of leases, moves and preemptions that empty these instances."""
        ends = tuple(lease_ends(b for b in self.snapshot.batches if b.batch_id in self.batch_ids))
        rooms, moved, dropped = _Rooms(self.snapshot.free.copy()), list[KVMigration](), list[RequestView]()
        for view in sorted(self._resting(), key=arrival_order):
            moves = rooms.moves(view, self.draining_ids)
            moved += moves
            if not moves:
                dropped.append(view)
        return IterationPlan(
            migrations=tuple(moved),
            preemptions=tuple(Preemption(view.request_id) for view in dropped),
            lease_ends=ends,
            decisions=tuple(self._decisions(ends, moved, dropped)),
        )

    def hidden(self, plan: IterationPlan) -> Snapshot:
        """Return the snapshot for the policy: without these instances, and with `plan` carried out.

        A batch that other instances run with them keeps those busy, but has no requests.
        """
        snapshot, arriving = self.snapshot, plan.migrations
        instances = {i.instance_id: i for i in snapshot.instances if not i.is_draining}
        for migration in arriving:
            instance = instances[migration.destination_id]
            instances[instance.instance_id] = instance.using(
                instance.kv_used + len(migration.segment.positions)
            )
        return replace(
            snapshot,
            instances=tuple(instances.values()),
            waiting=tuple(v for v in snapshot.waiting if v.request_id not in self.request_ids),
            running=tuple(v for v in snapshot.running if v.request_id not in self.request_ids),
            batches=tuple(self._shown(snapshot.batches)),
            ending=tuple(self._shown(snapshot.ending)),
            migrations=tuple(m for m in snapshot.migrations if self._is_apart(m)),
            leaving={i: n for i, n in snapshot.leaving.items() if i in instances},
        )

    def _resting(self) -> Iterator[RequestView]:
        """Yield the requests with KV on these instances that nothing in flight touches."""
        ending_ids = self.snapshot.ending_ids
        for view in self.snapshot.running:
            if view.is_plannable and view.request_id not in ending_ids and _holders(view, self.draining_ids):
                yield view

    def _shown(self, batches: Iterable[RunningBatch]) -> Iterator[RunningBatch]:
        for batch in batches:
            if batch.batch_id not in self.batch_ids:
                yield batch
            elif left := tuple(i for i in batch.plan.group.instance_ids if i not in self.draining_ids):
                plan = BatchPlan(ESPGroup(left), (), (), predicted_time=batch.plan.predicted_time)
                last_step = batch.num_steps_taken + 1
                yield replace(batch, plan=plan, last_step=last_step, holder_ids=())

    def _is_apart(self, migration: KVMigration) -> bool:
        ends = (migration.segment.instance_id, migration.destination_id)
        return self.draining_ids.isdisjoint(ends) and migration.segment.owner_id not in self.request_ids

    def _decisions(
        self, ends: Iterable[LeaseEnd], moved: Iterable[KVMigration], dropped: Iterable[RequestView]
    ) -> Iterator[Decision]:
        for end in ends:
            batch = self.snapshot.batch[end.batch_id]
            named = _named(self.draining_ids.intersection(batch.participant_ids))
            yield Decision(DecisionKind.END_LEASE, batch.plan.request_ids, ENDED.format(named))
        for migration in moved:
            segment = migration.segment
            yield Decision(DecisionKind.MIGRATE, (segment.owner_id,), MOVED.format(segment.instance_id))
        for view in dropped:
            named = _named(_holders(view, self.draining_ids))
            yield Decision(DecisionKind.PREEMPT, (view.request_id,), DROPPED.format(named))


@dataclass(slots=True)
class _Rooms:
    """The free slots of the instances that stay."""

    free: dict[InstanceId, int]

    def moves(self, view: RequestView, draining_ids: frozenset[InstanceId]) -> list[KVMigration]:
        """Return the moves of all KV of a request on draining instances to one other; none without room.

        An instance with room until the request's declared end comes first, then one that has some of its KV.
        """
        segments = [s for s in view.placement.segments if s.instance_id in draining_ids]
        num_moved = sum(len(segment.positions) for segment in segments)
        num_final = num_moved + view.num_final_tokens - view.num_computed_tokens
        held = view.placement.tokens_by_instance()
        fitting = [i for i, num_free in self.free.items() if num_free >= num_moved]
        if not fitting:
            return []
        best = max(fitting, key=lambda i: (self.free[i] >= num_final, held.get(i, 0), self.free[i], -i))
        self.free[best] -= num_moved
        return [KVMigration(segment, best) for segment in segments]


def _in_flight(snapshot: Snapshot) -> tuple[RunningBatch, ...]:
    return (*snapshot.batches, *snapshot.ending)


def _holders(view: RequestView, draining_ids: frozenset[InstanceId]) -> frozenset[InstanceId]:
    return draining_ids.intersection(view.placement.instance_ids)


def _named(instance_ids: Iterable[InstanceId]) -> str:
    return " and ".join(map(str, sorted(instance_ids)))
