"""A policy that does anything the rules allow, for no reason at all."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from loong.core.cost.cost_model import CostModel
from loong.core.instance import ESPGroup, InstanceKind, Service
from loong.core.placement import CachedKV, InstanceId, KVSegment
from loong.core.plan import (
    BatchPlan,
    Borrowing,
    Eviction,
    IterationPlan,
    KVMigration,
    LeaseEnd,
    LeaseExtension,
    Preemption,
    QueryBlock,
    Transfer,
)
from loong.core.positions import common, first_of, subtract
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.core.window_memory import ending_before
from loong.scheduler.policy import Policy

_MAX_DRAWS = 20


def chaos(seed: int) -> Policy:
    """Groups, holders outside, rings, masters, chunks, retention, leases, migrations, lost KV at random.

    It goes on as long as there are requests: if nothing is in flight it draws until something is, and makes
    room if nothing can be.
    """
    random = Random(seed)

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        plan = any_plan(random, snapshot)
        in_flight = snapshot.is_anything_in_flight
        for _ in range(_MAX_DRAWS):
            if in_flight or plan.batches or plan.migrations or not snapshot.request:
                return plan
            plan = any_plan(random, snapshot)
        return IterationPlan(preemptions=tuple(Preemption(v.request_id) for v in snapshot.running))

    return policy


def any_plan(random: Random, snapshot: Snapshot) -> IterationPlan:
    """Return any plan that keeps the rules."""
    return _Draw(random, snapshot).plan()


@dataclass
class _Draw:
    """One plan; `free` is the room that it leaves."""

    random: Random
    snapshot: Snapshot
    free: dict[InstanceId, int] = field(init=False)
    full_ids: frozenset[InstanceId] = field(init=False)
    host_ids: frozenset[InstanceId] = field(init=False)

    def __post_init__(self) -> None:
        instances = self.snapshot.instances
        self.free = {i.instance_id: i.kv_free for i in instances}
        self.full_ids = frozenset(i.instance_id for i in instances if i.kind is InstanceKind.FULL)
        self.host_ids = frozenset(i.instance_id for i in instances if i.kind is InstanceKind.HOST)

    def plan(self) -> IterationPlan:
        """Something for each request that is at rest, or nothing."""
        waiting, running = self.snapshot.waiting, self.snapshot.running
        computed: list[RequestView] = []
        migrations: list[KVMigration] = []
        preemptions: list[Preemption] = []
        evictions: list[Eviction] = []
        waiting = tuple(map(self._borrowing, waiting))
        for view in self._shuffled([v for v in (*waiting, *running) if v.is_plannable]):
            has_kv, choice = view.has_begun, self.random.random()
            if has_kv and choice < 0.04 and view.request_id not in self.snapshot.ending_ids:
                preemptions.append(Preemption(view.request_id))
                for instance_id, num_tokens in view.own_tokens_by_instance().items():
                    if not self.snapshot.instance[instance_id].is_draining:
                        self.free[instance_id] += num_tokens
            elif has_kv and choice < 0.08 and view.request_id not in self.snapshot.ending_ids:
                eviction = self._eviction(view)
                evictions.append(eviction)
                kept = view.placement.removing(eviction.segment)
                migrations += self._migrations(replace(view, placement=kept))
            elif has_kv and (choice < 0.2 or not self.host_ids.isdisjoint(view.placement.instance_ids)):
                migrations += self._migrations(view)
            else:
                computed.append(view)
        for view in self._shuffled([v for v in running if v.batch_id is not None and v.is_copyable]):
            if view.request_id not in self.snapshot.ending_ids and self.random.random() < 0.1:
                migrations += self._migrations(view)
        # what is copied stays, though its last reader goes
        copied = [] if preemptions or evictions else list(self._owner_migrations())
        evictions += self._owner_evictions([*copied, *migrations], waiting)
        migrations += copied
        batches = tuple(self._batches(computed))
        begun_ids = {request_id for batch in batches for request_id in batch.request_ids}
        for view in [v for v in running if v.request_id in begun_ids and self.random.random() < 0.15]:
            migrations += self._migrations(view)  # while the batch reads it
        ends = tuple(self._lease_ends())
        return IterationPlan(
            batches,
            tuple(migrations),
            tuple(preemptions),
            ends,
            lease_extensions=tuple(self._extensions(frozenset(end.batch_id for end in ends))),
            evictions=tuple(evictions),
            borrowings=tuple(
                [Borrowing(v.request_id, tuple([c.segment for c in v.cached])) for v in waiting]
            ),
        )

    def _borrowing(self, view: RequestView) -> RequestView:
        """Let a request that waits read any of the KV that is there for it."""
        chosen: list[CachedKV] = []
        for segment, is_read in self.random.sample(view.cached, len(view.cached)):
            if segment.instance_id in self.host_ids:
                continue
            read = [c.segment.positions for c in chosen]  # perhaps of another copy
            pieces = [p for left in subtract((segment.positions,), *read) for p in self._pieces(left, 2)]
            num_pieces = self.random.choice((0, 1, len(pieces), len(pieces)))
            for positions in self.random.sample(pieces, min(num_pieces, len(pieces))):
                if self.free[segment.instance_id] >= len(positions):
                    chosen.append(CachedKV(segment._replace(positions=positions), is_read))
                    self.free[segment.instance_id] -= len(positions)  # it may be read no more
        if view.no_ends:
            chosen = [*ending_before(chosen, view.no_ends)]
        own = [c.segment._replace(owner_id=view.request_id) for c in chosen]
        return replace(view, placement=view.placement.adding(own), cached=tuple(chosen))

    def _shuffled(self, items: Sequence[RequestView]) -> list[RequestView]:
        return self.random.sample(items, len(items))

    def _shuffled_ids(self, instance_ids: Sequence[InstanceId]) -> list[InstanceId]:
        return self.random.sample(instance_ids, len(instance_ids))

    def _subset(self, instance_ids: Sequence[InstanceId]) -> list[InstanceId]:
        """Return some of these, at least one, in any order."""
        return self.random.sample(instance_ids, self.random.randint(1, len(instance_ids)))

    def _able(self, group: Sequence[InstanceId]) -> list[InstanceId]:
        """Return those of a group that can be masters."""
        return [i for i in group if i in self.full_ids]

    def _pieces(self, positions: range, count: int) -> list[range]:
        """Return at most `count` parts of some positions: stripes, or runs."""
        if self.random.random() < 0.5:
            pieces = [positions[i::count] for i in range(count)]
        else:
            cuts = sorted(self.random.randint(0, len(positions)) for _ in range(count - 1))
            pieces = [positions[a:b] for a, b in zip([0, *cuts], [*cuts, len(positions)], strict=True)]
        return [piece for piece in pieces if piece]

    def _lease_ends(self) -> Iterator[LeaseEnd]:
        for batch in self.snapshot.batches:
            if batch.last_step > batch.num_steps_taken and self.random.random() < 0.2:
                step = self.random.randint(batch.num_steps_taken + 1, batch.last_step)
                yield LeaseEnd(batch.batch_id, step)

    def _extensions(self, ended_ids: frozenset[int]) -> Iterator[LeaseExtension]:
        for batch in self.snapshot.batches:
            if batch.is_extendable and batch.batch_id not in ended_ids and self.random.random() < 0.5:
                num_steps = batch.plan.num_steps + self.random.randint(1, 9)
                extension = LeaseExtension(batch.batch_id, num_steps)
                grown = Counter(self.snapshot.extended(extension).num_stored_tokens)
                grown.subtract(batch.plan.num_stored_tokens)
                if all(num_tokens <= self.free[i] for i, num_tokens in grown.items()):
                    self.free = {i: free - grown[i] for i, free in self.free.items()}
                    yield extension

    def _migrations(self, view: RequestView) -> Iterator[KVMigration]:
        """All that is on host tiers comes back to instances; if nothing is, some parts go anywhere."""
        segments = view.placement.segments
        offloaded = [segment for segment in segments if segment.instance_id in self.host_ids]
        for segment in offloaded or segments:
            positions = segment.positions
            if not offloaded:
                positions = self.random.choice(self._pieces(positions, self.random.randint(1, 3)))
            targets = (
                self.free.keys() - self.host_ids if offloaded else self.free.keys() - {segment.instance_id}
            )
            fitting = [i for i in sorted(targets) if self.free[i] >= len(positions)]
            if fitting and (offloaded or self.random.random() < 0.5):
                destination_id = self.random.choice(fitting)
                self.free[destination_id] -= len(positions)
                yield KVMigration(segment._replace(positions=positions), destination_id)

    def _owner_migrations(self) -> Iterator[KVMigration]:
        """KV of some owners that are no requests goes elsewhere, or is copied there."""
        for owner in self.snapshot.owners.values():
            in_flight = [m for m in self.snapshot.copies if m.segment.owner_id == owner.owner_id]
            if in_flight or self.random.random() > 0.3:
                continue
            segment = self.random.choice(owner.placement.segments)
            source_id = segment.instance_id
            there = subtract((segment.positions,), *owner.retired.on(source_id))
            positions = self.random.choice([*there, range(0)])
            fitting = [
                i
                for i in sorted(self.free.keys() - {source_id})
                if self.free[i] >= len(positions) and not common((positions,), *owner.placement.on(i))
            ]
            unread = sum(map(len, common((positions,), *owner.unread.on(source_id))))
            if positions and fitting and (not unread or unread <= self.free[source_id]):
                destination_id = self.random.choice(fitting)
                self.free[destination_id] -= len(positions)
                self.free[source_id] -= unread
                keeps_source = self.random.random() < 0.7
                yield KVMigration(segment._replace(positions=positions), destination_id, keeps_source)

    def _owner_evictions(
        self, migrations: Sequence[KVMigration], borrowing: Sequence[RequestView]
    ) -> Iterator[Eviction]:
        """Some of their KV that nothing reads, and that does not move, is dropped."""
        used = {m.segment.owner_id for m in migrations}
        used.update(c.segment.owner_id for view in borrowing for c in view.cached)
        for owner in self.snapshot.owners.values():
            if owner.unread.segments and owner.owner_id not in used and self.random.random() < 0.1:
                yield Eviction(self.random.choice(owner.unread.segments))

    def _eviction(self, view: RequestView) -> Eviction:
        segment = self.random.choice(view.placement.segments)
        pieces = self._pieces(segment.positions, self.random.randint(1, 3))
        return Eviction(segment._replace(positions=self.random.choice(pieces)))

    def _batches(self, views: list[RequestView]) -> Iterator[BatchPlan]:
        """Groups of idle instances, mostly around a request whose KV they hold, with others that fit.

        Holders that are busy, and some that are not, serve instead.
        """
        idle = {instance.instance_id for instance in self.snapshot.instances if instance.is_idle}
        while views and idle:
            held = set(views[0].placement.instance_ids)
            joining = {i for i in sorted(held & idle) if self.random.random() < 0.7}
            extra = sorted(idle - held)
            num_extra = self.random.randint(0 if joining else 1, len(extra)) if extra else 0
            group = [*sorted(joining), *self.random.sample(extra, num_extra)]
            able = [v for v in views if self._can_reach(v, group)]
            if able and self.full_ids.intersection(group) and self.random.random() < 0.8:
                self.random.shuffle(group)
                chosen = able[: self.random.randint(1, len(able))]
                if (batch := self._batch(tuple(group), chosen)) is not None:
                    yield batch
                    idle -= set(group)
                    views = [view for view in views if view not in chosen]
                    continue
            views = views[1:]

    def _can_reach(self, view: RequestView, group: Sequence[InstanceId]) -> bool:
        """Return whether all KV of a request is in the group, or served to it."""
        outside = [self.snapshot.instance[i] for i in view.placement.instance_ids if i not in group]
        return all(i.serves is Service.ALL and i.kind is not InstanceKind.HOST for i in outside)

    def _batch(self, group: tuple[InstanceId, ...], views: Sequence[RequestView]) -> BatchPlan | None:
        may_lease = all(view.is_decoding for view in views) and self.random.random() < 0.7
        num_steps = self.random.randint(2, 6) if may_lease else 1
        queries: list[QueryBlock] = []
        writes: list[KVSegment] = []
        for view in views:
            chunk = self._lease(view, group, num_steps) if may_lease else self._chunk(view, group)
            if chunk is not None:
                queries += chunk[0]
                writes += chunk[1]
        if not queries:
            return None
        batch = BatchPlan(ESPGroup(group), tuple(queries), tuple(writes), num_steps)
        if num_steps == 1:
            return batch
        number = min(self.random.randint(1, 4), len(batch.request_ids))
        rotates = 1 < len(group) == number - 1
        return replace(batch, num_micro_batches=number, rotates=rotates and self.random.random() < 0.7)

    def _lease(
        self, view: RequestView, group: tuple[InstanceId, ...], num_steps: int
    ) -> tuple[list[QueryBlock], list[KVSegment]] | None:
        first, master_id = view.num_computed_tokens, self.random.choice(self._able(group))
        positions = range(first, first + min(num_steps, view.num_remaining_tokens))
        block = QueryBlock(view.request_id, positions[:1], master_id, Transfer.QUERY)
        writes = self._stored(view, [(positions, master_id)])
        return None if writes is None else ([block], writes)

    def _chunk(
        self, view: RequestView, group: tuple[InstanceId, ...]
    ) -> tuple[list[QueryBlock], list[KVSegment]] | None:
        """Some of the first missing positions, in parts of any shape, computed and stored anywhere."""
        rest = view.num_uncomputed_tokens
        count = rest if self.random.random() < 0.4 else self.random.randint(1, rest)
        masters = self._subset(self._able(group))
        parts = [
            part
            for positions in first_of(view.missing, count)
            for part in zip(self._pieces(positions, len(masters)), self._shuffled_ids(masters), strict=False)
        ]
        is_inside = set(group).issuperset(view.placement.instance_ids)
        transfer = self.random.choice(tuple(Transfer)) if is_inside else Transfer.QUERY
        stored = parts
        passing = list[tuple[range, InstanceId]]()
        if transfer is Transfer.KV and self.random.random() < 0.8:
            keepers = self._subset([*group, *self._servers(group)] if self.random.random() < 0.3 else group)
            stored = [(p, self.random.choice(keepers)) for whole, _ in parts for p in self._pieces(whole, 2)]
        elif transfer is Transfer.QUERY and self.random.random() < 0.3 and (servers := self._servers(group)):
            pieces = [(p, i) for whole, i in parts for p in self._pieces(whole, 2)]
            stored = [(p, self.random.choice([i, *servers])) for p, i in pieces]
            passing = [(p, i) for (p, i), (_, to) in zip(pieces, stored, strict=True) if to != i]
        writes = self._stored(view, stored, passing)
        blocks = [QueryBlock(view.request_id, positions, i, transfer) for positions, i in parts]
        return None if writes is None else (blocks, writes)

    def _servers(self, group: Sequence[InstanceId]) -> list[InstanceId]:
        """Return instances outside a group that KV may be pushed to."""
        instances = (
            i for i in self.snapshot.instances if i.serves is Service.ALL and i.kind is not InstanceKind.HOST
        )
        return [i.instance_id for i in instances if i.instance_id not in group]

    def _stored(
        self,
        view: RequestView,
        parts: Sequence[tuple[range, InstanceId]],
        passing: Sequence[tuple[range, InstanceId]] = (),
    ) -> list[KVSegment] | None:
        """Return the segments of these parts, if there is room for them and for temporary KV."""
        left = dict(self.free)
        for positions, instance_id in (*parts, *passing):
            left[instance_id] -= len(positions)
        if min(left.values()) < 0:
            return None
        self.free = left
        return [KVSegment(view.request_id, positions, instance_id) for positions, instance_id in parts]
