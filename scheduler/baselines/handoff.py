"""Migration of KV from the instances that compute prompts to those that decode."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from loong.core.decision import Decision, DecisionKind
from loong.core.placement import InstanceId, KVSegment, tokens_by_instance
from loong.core.plan import KVMigration, Preemption, PreemptionReason
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.leases import arrival_order
from loong.scheduler.common.room import Room
from loong.scheduler.esp.admission import KVForecast

NO_ROOM = "its prompt is computed, and the instances for decodes have too little room for all its tokens"
HANDED_OFF = "its prompt is computed, and it goes on where there are only decodes"
ON_BOTH = "instances have changed their roles, and its KV is on some of either kind"


@dataclass(frozen=True, slots=True)
class Handoff:
    """The `migrations` of `moved` requests, while `blocked` ones wait for room on decode instances.

    Prompts with KV `on_both` kinds of instances are preempted, and decodes if nothing else can go on. `there`
    are requests that have KV on decode instances, or a migration to them in flight.
    """

    migrations: tuple[KVMigration, ...]
    moved: Sequence[RequestView]
    blocked: Sequence[RequestView]
    on_both: Sequence[RequestView]
    there: Sequence[RequestView]

    @property
    def preemptions(self) -> tuple[Preemption, ...]:
        """Return preemptions of the prompts that must be computed again."""
        return tuple(
            Preemption(
                view.request_id,
                PreemptionReason.NO_ROOM if view.is_decoding else PreemptionReason.CHANGED_ROLES,
            )
            for view in self.on_both
        )

    @property
    def decisions(self) -> Iterator[Decision]:
        """Yield the reasons of migrations, waits and preemptions."""
        for kind, views, why in (
            (DecisionKind.MIGRATE, self.moved, HANDED_OFF),
            (DecisionKind.WAIT, self.blocked, NO_ROOM),
            (DecisionKind.PREEMPT, self.on_both, ON_BOTH),
        ):
            if views:
                yield Decision(kind, tuple(view.request_id for view in views), why)

    def left_by(self, sources: Snapshot) -> Snapshot:
        """Return the prefill part, without the requests that no plan there may name."""
        return replace(
            sources,
            running=tuple(self._not_planned(sources.running)),
            migrations=sources.migrations + self.migrations,
        )

    def come_to(self, destinations: Snapshot) -> Snapshot:
        """Return the decode part with slots reserved for `moved`, which no plan there may name yet."""
        arriving = tokens_by_instance(migration.arriving for migration in self.migrations)
        there_ids = {view.request_id for view in self.there}
        coming = [view for view in self.moved if view.request_id not in there_ids]
        return replace(
            destinations,
            instances=tuple(i.using(i.kv_used + arriving[i.instance_id]) for i in destinations.instances),
            running=tuple(self._not_planned((*self.there, *coming))),
            migrations=destinations.migrations + self.migrations,
        )

    def _not_planned(self, views: Iterable[RequestView]) -> Iterator[RequestView]:
        """Return these views, with those of this handoff marked as migrating."""
        own = {view.request_id for some in (self.moved, self.blocked, self.on_both) for view in some}
        for view in views:
            is_elsewhere = view.request_id in own or view.is_migrating
            yield _as_moving(view) if is_elsewhere else view


def hand_off(snapshot: Snapshot, sources: Snapshot, destinations: Snapshot) -> Handoff:
    """Move requests with computed prompts, oldest first, until one lacks room for its declared end.

    A request moves to the decode instance with the most slots that no other needs. It moves to several
    instances if no single one can ever hold it.
    """
    source_ids, decode_ids = frozenset(sources.pools), frozenset(destinations.pools)
    occupied = [v for v in snapshot.running if v.is_plannable and _is_on(v, source_ids)]
    occupied = [v for v in occupied if (source_ids | decode_ids).issuperset(v.placement.instance_ids)]
    movable = {v.request_id: v for v in sorted(occupied, key=arrival_order) if v.is_decoding}
    on_both = [v for v in occupied if not v.is_decoding and _is_on(v, decode_ids)]
    destination_of = {m.segment.owner_id: m.destination_id for m in destinations.migrations}
    there = {
        v.request_id: v for v in snapshot.running if _is_on(v, decode_ids) or v.request_id in destination_of
    }
    if not movable:
        return Handoff((), (), (), on_both, tuple(there.values()))
    part = replace(destinations, running=tuple(map(_as_moving, there.values())))
    forecast = KVForecast(sum(part.pools.values()), part.running)
    staying = ((view, home) for view, home in _homes(part, destination_of) if view.request_id not in movable)
    room = Room.left_by(staying, part.free)
    moved, migrations = list[RequestView](), list[KVMigration]()
    for request_id, view in movable.items():
        is_admitted = request_id in there or forecast.takes(view)
        moves = _moves(view, source_ids, room, part.pools) if is_admitted else None
        if moves is None:
            break
        moved.append(view)
        migrations += moves
    blocked = tuple(movable.values())[len(moved) :]
    if not (migrations or snapshot.is_anything_in_flight):
        on_both += [view for view in blocked if _is_on(view, decode_ids)]  # they hold the room of the oldest
    return Handoff(tuple(migrations), moved, blocked, on_both, tuple(there.values()))


def _as_moving(view: RequestView) -> RequestView:
    """Return the view of a request that migrates: its copy borrows nothing."""
    return replace(view, is_migrating=True, borrowed=())


def _is_on(view: RequestView, instance_ids: Set[InstanceId]) -> bool:
    return not instance_ids.isdisjoint(view.placement.instance_ids)


def _homes(
    part: Snapshot, destination_of: Mapping[RequestId, InstanceId]
) -> Iterator[tuple[RequestView, InstanceId | None]]:
    """Yield the requests of a part with the instance where each grows: where its newest KV is or moves to."""
    for view in part.running:
        there = [s.instance_id for s in view.placement.segments if s.instance_id in part.free]
        yield view, destination_of.get(view.request_id, there[-1] if there else None)


def _moves(
    view: RequestView, source_ids: Collection[InstanceId], room: Room, pools: Mapping[InstanceId, int]
) -> list[KVMigration] | None:
    """Return the migrations of all its KV on `source_ids`; None if there is no room yet."""
    segments = [s for s in view.placement.segments if s.instance_id in source_ids]
    num_moved, num_to_come = sum(len(segment.positions) for segment in segments), view.num_tokens_to_come
    if room.spare[room.sparest_id] >= num_moved + num_to_come:
        destination_id = room.sparest_id
        room.take(destination_id, num_moved, num_to_come)
        return [KVMigration(segment, destination_id) for segment in segments]
    if view.num_final_tokens <= max(pools.values()) or sum(room.free.values()) < num_moved:
        return None
    return list(_spread(segments, room))


def _spread(segments: Iterable[KVSegment], room: Room) -> Iterator[KVMigration]:
    """Fill the instances with the most free slots, one after the other."""
    for segment in segments:
        positions = segment.positions
        while positions:
            freest_id = room.freest_id
            part, positions = positions[: room.free[freest_id]], positions[room.free[freest_id] :]
            room.take(freest_id, len(part))
            yield KVMigration(segment._replace(positions=part), freest_id)
