"""The removal of instances under any policy: their KV goes elsewhere, and the policy does not see them.

Batches on a draining instance end at their next boundary. Then the KV of their requests there moves to
instances with room. What finds no room is evicted, and just that is computed again.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from loong.core.decision import Decision, DecisionKind
from loong.core.instance import ElasticInstance, ESPGroup
from loong.core.placement import InstanceId, KVSegment, tokens_by_instance
from loong.core.plan import BatchPlan, Eviction, IterationPlan, KVMigration, LeaseEnd
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.cluster_parts import Parts
from loong.scheduler.common.leases import arrival_order, lease_ends
from loong.scheduler.common.room import Room

MOVED = "its KV moves from instance {}, which is to leave"
EVICTED = "{}, and no other has room for {} tokens of its KV"


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
        request_ids.update(
            m.segment.owner_id for m in snapshot.migrations if m.destination_id in draining_ids
        )
        return cls(snapshot, draining_ids, frozenset(b.batch_id for b in batches), frozenset(request_ids))

    def plan(self, parts: Parts) -> IterationPlan:
        """Return the ends of leases, moves and evictions that empty these instances.

        The KV of a request stays within one of `parts`, which are of the other instances. Requests with
        output come first, so that their streams go on.
        """
        ends = tuple(lease_ends(b for b in self.snapshot.batches if b.batch_id in self.batch_ids))
        resting = sorted(
            self._resting(), key=lambda view: (view.num_output_tokens == 0, *arrival_order(view))
        )
        room = self._room_beside({view.request_id for view in resting})
        moved, evicted = list[KVMigration](), list[KVSegment]()
        for view in resting:
            leaving = [s for s in view.placement.segments if s.instance_id in self.draining_ids]
            moves, homeless = _placed(view, leaving, parts, room)
            moved += moves
            evicted += homeless
        return IterationPlan(
            migrations=tuple(moved),
            evictions=tuple(map(Eviction, evicted)),
            lease_ends=ends,
            decisions=tuple(self._decisions(ends, moved, evicted)),
        )

    def hidden(self, plan: IterationPlan) -> Snapshot:
        """Return the snapshot for the policy, without these instances and their requests.

        Slots of such requests on other instances, with those that they may still need after `plan`, are not
        there either. A batch that other instances run with these keeps them busy, but has no requests. Those
        that serve a hidden lease serve fewer others until it ends.
        """
        snapshot = self.snapshot
        instances = {i.instance_id: i for i in self._without_hidden_kv(plan)}
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

    def _without_hidden_kv(self, plan: IterationPlan) -> Iterator[ElasticInstance]:
        """Yield the other instances without the slots of hidden requests: used, arriving, or yet to come.

        KV that choices share counts for each. It only makes the policy more careful for a moment.
        """
        used, needed = Counter[InstanceId](), Counter[InstanceId]()
        moves = (*self.snapshot.migrations, *plan.migrations)
        homes = homes_of(self.snapshot, moves, self.snapshot.pools)
        evicted_ids = {eviction.segment.owner_id for eviction in plan.evictions}
        for view in (v for v in self.snapshot.running if v.request_id in self.request_ids):
            used.update(view.placement.tokens_by_instance())
            if view.request_id in homes and view.request_id not in evicted_ids:
                needed[homes[view.request_id]] += view.num_tokens_to_come
        for batch in self.snapshot.batches:
            if batch.batch_id in self.batch_ids:
                used.update(batch.plan.num_reserved_tokens)
        arriving = Counter[InstanceId]()
        for migration in plan.migrations:
            arriving[migration.destination_id] += len(migration.segment.positions)
        for migration in self.snapshot.migrations:
            if not self._is_apart(migration):
                used[migration.destination_id] += len(migration.segment.positions)
        hidden = [b for b in self.snapshot.batches if b.batch_id in self.batch_ids]
        leases = [batch for batch in hidden if batch.plan.num_steps > 1]
        num_served = Counter(i for batch in leases for i in batch.holder_ids)

        for instance in self.snapshot.instances:
            if not instance.is_draining:
                i = instance.instance_id
                num_used = min(used[i], instance.kv_used)
                num_gone = arriving[i] + min(needed[i], instance.kv_free - arriving[i])
                yield replace(
                    instance,
                    kv_capacity=instance.kv_capacity - num_used - num_gone,
                    kv_used=instance.kv_used - num_used,
                    max_served_leases=instance.max_served_leases - num_served[i],
                )

    def _room_beside(self, moving_ids: Container[RequestId]) -> Room:
        """Return the room that all requests but those that are to move leave on the other instances."""
        free = {**self.snapshot.free, **self.snapshot.memory_free}
        homes = homes_of(self.snapshot, self.snapshot.migrations, free)
        staying = ((self.snapshot.request[r], home) for r, home in homes.items() if r not in moving_ids)
        return Room.left_by(staying, free)

    def _resting(self) -> Iterator[RequestView]:
        """Yield the requests with KV on these instances that nothing in flight touches."""
        ending_ids = self.snapshot.ending_ids
        for view in self.snapshot.running:
            if view.is_plannable and view.request_id not in ending_ids and _holders(view, self.draining_ids):
                yield view

    def _shown(self, batches: Iterable[RunningBatch]) -> Iterator[RunningBatch]:
        for batch in batches:
            if batch.batch_id not in self.batch_ids:
                yield self._without_hidden(batch)
            elif left := tuple(i for i in batch.plan.group.instance_ids if i not in self.draining_ids):
                plan = BatchPlan(ESPGroup(left), (), (), predicted_time=batch.plan.predicted_time)
                last_step = batch.num_steps_taken + 1
                yield replace(batch, plan=plan, last_step=last_step, holder_ids=())

    def _without_hidden(self, batch: RunningBatch) -> RunningBatch:
        """Return a batch of other instances without requests whose KV moves to these meanwhile."""
        if self.request_ids.isdisjoint(batch.plan.request_ids):
            return batch
        plan = replace(
            batch.plan,
            queries=tuple(q for q in batch.plan.queries if q.request_id not in self.request_ids),
            writes=tuple(w for w in batch.plan.writes if w.owner_id not in self.request_ids),
        )
        return replace(batch, plan=plan)

    def _is_apart(self, migration: KVMigration) -> bool:
        return migration.segment.owner_id not in self.request_ids

    def _decisions(
        self, ends: Iterable[LeaseEnd], moved: Iterable[KVMigration], evicted: Iterable[KVSegment]
    ) -> Iterator[Decision]:
        for end in ends:
            batch = self.snapshot.batch[end.batch_id]
            why = _leaving(self.draining_ids.intersection(batch.participant_ids))
            yield Decision(DecisionKind.END_LEASE, batch.plan.request_ids, why)
        for owner_id, source_id in dict.fromkeys((m.segment.owner_id, m.segment.instance_id) for m in moved):
            yield Decision(DecisionKind.MIGRATE, (owner_id,), MOVED.format(source_id))
        for owner_id, segments in groupby(evicted, attrgetter("owner_id")):
            kv = tokens_by_instance(segments)
            why = EVICTED.format(_leaving(frozenset(kv)), kv.total())
            yield Decision(DecisionKind.EVICT, (owner_id,), why)


def _placed(
    view: RequestView, leaving: Sequence[KVSegment], parts: Parts, room: Room
) -> tuple[list[KVMigration], list[KVSegment]]:
    """Return the moves of a request's KV on draining instances, and the rest, which finds no room.

    It goes to one instance with room until the request's declared end, if there is any, or else to several.
    Those with some of its KV are preferred. An instance that is a part by itself has all KV of a request or
    none: its policy may compute prompts whole.
    """
    num_leaving, spare = sum(len(segment.positions) for segment in leaving), room.spare
    held, num_to_come = view.placement.tokens_by_instance(), view.num_tokens_to_come
    part = max(parts, key=lambda ids: _share(ids, held, spare), default=())
    order = sorted(part, key=lambda i: (-held.get(i, 0), -spare[i], i))
    order = [i for i in order if spare[i] >= num_leaving + num_to_come][:1] or order
    if len(part) == 1 and not held.get(part[0]) and spare[part[0]] < num_leaving:
        return [], [*leaving]
    moves, rest = list[KVMigration](), list[KVSegment]()
    for segment in leaving:
        positions = segment.positions
        for instance_id in order:
            if positions and (num_spare := spare[instance_id]) > 0:
                arriving, positions = positions[:num_spare], positions[num_spare:]
                room.take(instance_id, len(arriving))
                moves.append(KVMigration(segment._replace(positions=arriving), instance_id))
        if positions:
            rest.append(segment._replace(positions=positions))
    if not rest:
        room.take(moves[-1].destination_id, 0, num_to_come)
    return moves, rest


def _share(
    instance_ids: Iterable[InstanceId], held: Mapping[InstanceId, int], spare: Mapping[InstanceId, int]
) -> tuple[int, int]:
    """Return how much KV a request has on some instances, and how much room it finds there."""
    return sum(held.get(i, 0) for i in instance_ids), sum(max(0, spare[i]) for i in instance_ids)


def _in_flight(snapshot: Snapshot) -> tuple[RunningBatch, ...]:
    return (*snapshot.batches, *snapshot.ending)


def _holders(view: RequestView, draining_ids: frozenset[InstanceId]) -> frozenset[InstanceId]:
    return draining_ids.intersection(view.placement.instance_ids)


def _leaving(instance_ids: frozenset[InstanceId]) -> str:
    """Return in words that instances are to leave."""
    named = " and ".join(map(str, sorted(instance_ids)))
    return f"instances {named} are to leave" if len(instance_ids) > 1 else f"instance {named} is to leave"


def homes_of(
    snapshot: Snapshot, moves: Iterable[KVMigration], instance_ids: Container[InstanceId]
) -> dict[RequestId, InstanceId]:
    """Return where KV of running requests is to grow, among some instances.

    That is where it moves, where its newest part is, or where its batch makes some.
    """
    destinations = {m.segment.owner_id: m.destination_id for m in moves}
    homes = {}
    for view in snapshot.running:
        batch = None if view.batch_id is None else snapshot.batch[view.batch_id]
        made = () if batch is None else batch.plan.writes_of(view.request_id)
        holder_ids = [segment.instance_id for segment in (*made, *view.placement.segments)]
        holder_ids.append(destinations.get(view.request_id, holder_ids[-1]))
        if there := [i for i in holder_ids if i in instance_ids]:
            homes[view.request_id] = there[-1]
    return homes
