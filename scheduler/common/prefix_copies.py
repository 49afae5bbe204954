"""Copies of prefixes: where a waiting request may read what it shares sooner than where that is now."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.instance import MAX_MOVING_TOKENS
from loong.core.placement import CachedKV, InstanceId, KVSegment, OwnerId
from loong.core.plan import IterationPlan, KVMigration
from loong.core.positions import common, subtract
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.cached_prefixes import reading_parts
from loong.scheduler.common.cluster_parts import Parts

COPIED = "the prefix of {} tokens goes to instance {} too"


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """A part that is to have what a request reads; `missing` is yet to come there.

    `alternatives` are the predicted seconds to its first token, there and otherwise.
    """

    place: int
    missing: tuple[KVSegment, ...]
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class PrefixCopies:
    """The prefixes that waiting requests may read, and what copies of them in other parts cost."""

    snapshot: Snapshot
    cost_model: CostModel
    parts: Parts

    @cached_property
    def num_readers(self) -> Counter[OwnerId]:
        """Return how many waiting requests may read each owner's KV."""
        waiting = (*self.snapshot.waiting, *self.snapshot.following)
        return Counter(o for view in waiting for o in {c.segment.owner_id for c in view.cached})

    def missing(self, view: RequestView, place: int) -> tuple[KVSegment, ...]:
        """Return what a request reads and no instance of a part has."""
        found: list[KVSegment] = []
        for segment, _ in view.cached:
            owner = self.snapshot.owners[segment.owner_id]
            there = [p for i in self.parts[place] for p in owner.placement.on(i)]
            found += [segment._replace(positions=p) for p in subtract((segment.positions,), *there)]
        return tuple(found)

    def seconds(self, missing: Sequence[KVSegment], place: int) -> float:
        """Return the time in which a part can have what it lacks."""
        destination_id = self.destination_id(place)
        return sum(
            self.cost_model.migration_time(len(segment.positions), segment.instance_id, destination_id)
            for segment in missing
        )

    def destination_id(self, place: int) -> InstanceId:
        """Return the instance of a part that takes copies: that with most room."""
        return max(self.parts[place], key=lambda i: (self.snapshot.free[i], -i))

    def pays(self, missing: Sequence[KVSegment], seconds: float, gain: float) -> bool:
        """Return whether the readers that wait gain more time than both ends of a copy spend."""
        num_readers = min((self.num_readers[segment.owner_id] for segment in missing), default=1)
        return gain * num_readers > 2 * seconds

    def reading_at(self, view: RequestView, place: int) -> RequestView:
        """Return a request that reads in a part what it could read elsewhere; the part has all of it."""
        parts: list[CachedKV] = []
        for wanted, _ in view.cached:
            owner, rest = self.snapshot.owners[wanted.owner_id], subtract((wanted.positions,))
            for instance_id in self.parts[place]:
                unread = owner.unread.on(instance_id)
                for here in owner.placement.on(instance_id):
                    met = common(rest, here)
                    rest = subtract(rest, *met)
                    alone = common(met, *unread)
                    read = subtract(met, *alone)
                    segments = [(p, True) for p in read] + [(p, False) for p in alone]
                    parts += [CachedKV(KVSegment(wanted.owner_id, p, instance_id), r) for p, r in segments]
        return reading_parts(view, parts)

    def planned(
        self, plan: IterationPlan, copying: Mapping[RequestId, CopyChoice]
    ) -> tuple[tuple[KVMigration, ...], tuple[Decision, ...]]:
        """Return the copies that can begin now along with a plan, and why.

        None do in a plan that drops KV: its room is counted on.
        """
        if plan.preemptions or plan.evictions or not copying:
            return (), ()
        room = _Room.beside(plan, self.snapshot)
        migrations, decisions = list[KVMigration](), list[Decision]()
        for request_id, choice in copying.items():
            destination_id = self.destination_id(choice.place)
            new = [m for s in choice.missing for m in room.taken(s, self.parts[choice.place], destination_id)]
            if new:
                num_tokens = sum(len(segment.positions) for segment in choice.missing)
                chosen = COPIED.format(num_tokens, destination_id)
                decisions.append(Decision(DecisionKind.COPY, (request_id,), chosen, choice.alternatives))
            migrations += new
        return tuple(migrations), tuple(decisions)


@dataclass
class _Room:
    """Free slots after a plan, and the copies on their way with those that join them."""

    snapshot: Snapshot
    free: Counter[InstanceId]
    copies: list[KVMigration]

    @classmethod
    def beside(cls, plan: IterationPlan, snapshot: Snapshot) -> "_Room":
        """Return the room that a plan leaves."""
        free = Counter(snapshot.after(plan).free)
        for batch in plan.batches:
            free.subtract(batch.num_reserved_tokens)
        for migration in plan.migrations:
            free[migration.destination_id] -= len(migration.segment.positions)
        for extension in plan.lease_extensions:
            free.subtract(snapshot.extended(extension).num_stored_tokens)
        return cls(snapshot, free, [*snapshot.copies])

    def taken(
        self, segment: KVSegment, part: Iterable[InstanceId], destination_id: InstanceId
    ) -> Iterator[KVMigration]:
        """Yield copies of as much of a segment as may go now, and is not on its way to that part."""
        owner_id, positions, source_id = segment
        part, owner = frozenset(part), self.snapshot.owners[owner_id]
        same = [m for m in self.copies if m.segment.owner_id == owner_id]
        moving = [m.segment.positions for m in same if not m.keeps_source]
        arriving = [m.segment.positions for m in same if m.destination_id in part]
        for rest in subtract((positions,), *arriving, *moving):
            link = source_id, destination_id
            on_way = sum(len(m.segment.positions) for m in self.copies if m.link == link)
            going = rest[: max(0, min(MAX_MOVING_TOKENS - on_way, self.free[destination_id]))]
            num_pinned = sum(map(len, common((going,), *owner.unread.on(source_id))))
            if going and num_pinned <= self.free[source_id]:
                self.free[destination_id] -= len(going)
                self.free[source_id] -= num_pinned
                copy = KVMigration(segment._replace(positions=going), destination_id, keeps_source=True)
                self.copies.append(copy)
                yield copy


def with_copies(
    plan: IterationPlan, copies: PrefixCopies, copying: Mapping[RequestId, CopyChoice]
) -> IterationPlan:
    """Return the plan with the copies for which requests wait."""
    migrations, decisions = copies.planned(plan, copying)
    if not migrations:
        return plan
    return replace(plan, migrations=(*plan.migrations, *migrations), decisions=(*plan.decisions, *decisions))
