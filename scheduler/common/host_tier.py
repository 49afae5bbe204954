"""KV that nobody reads is copied to memory of the host, long before its room is needed, and back for prompts.

A prompt waits for its KV if that comes sooner, behind what its link has to carry before, than it could be
computed. It goes to the instance that it came from, and stays in the host tier. KV is copied to the host tier
if computing it again would take longer than both ways. Most of the room stays in use meanwhile.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Alternative, Decision, DecisionKind
from loong.core.instance import MAX_MOVING_TOKENS
from loong.core.placement import InstanceId, KVSegment, tokens_by_instance
from loong.core.plan import IterationPlan, KVMigration
from loong.core.positions import common, subtract
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot

MOVE_TOKENS = MAX_MOVING_TOKENS // 2  # a move: while one is stored, the next is on its way
MOVED_PART = 16  # of the room of an instance: what is copied to its host tier at a time
MAX_LOADING = 16  # waiting requests, the oldest, whose KV may come at a time
LOADED = "{} tokens of its KV come from host memory"
COMPUTED = "{} tokens of its KV in host memory are computed again, as that is sooner"
WAITING = "its KV is on its way from host memory"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The KV that a waiting request has in host tiers alone, and the tokens that it has on instances."""

    view: RequestView
    segments: tuple[KVSegment, ...]
    num_cached: int

    @property
    def num_tokens(self) -> int:
        """Return the tokens in host tiers."""
        return sum(len(segment.positions) for segment in self.segments)


@dataclass(slots=True)
class HostTier:
    """The moves from host tiers that a plan makes, and the requests that wait for these or earlier ones.

    `home` is the instance of each host tier. `on_link` are the tokens on their way, or planned to be, between
    two instances, and `arriving` those of them that are planned. The KV of `computed` requests stays where it
    is.
    """

    snapshot: Snapshot
    cost_model: CostModel
    home: dict[InstanceId, InstanceId]
    on_link: Counter[tuple[InstanceId, InstanceId]]
    arriving: Counter[InstanceId] = field(default_factory=Counter)
    moves: list[KVMigration] = field(default_factory=list)
    waiting_ids: set[RequestId] = field(default_factory=set)
    computed: dict[RequestId, Decision] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    @classmethod
    def of(cls, snapshot: Snapshot, cost_model: CostModel) -> "HostTier | None":
        """Return what comes from host tiers next; None if there are none."""
        if not snapshot.tiers:
            return None
        on_link: Counter[tuple[InstanceId, InstanceId]] = Counter()
        for copy in snapshot.copies:
            on_link[copy.segment.instance_id, copy.destination_id] += len(copy.segment.positions)
        home = {tier_id: instance_id for instance_id, tier_id in snapshot.tiers.items()}
        tier = cls(snapshot, cost_model, home, on_link)
        candidates = [view for view in snapshot.waiting if view.cached and not view.has_ended]
        for view in candidates[:MAX_LOADING]:
            wanted = tier._wanted(view)
            if wanted.segments:
                tier._load(wanted)
        return tier

    def hiding(self) -> Snapshot:
        """Return the snapshot without the requests that wait for their KV, and the room that this takes."""
        if not self.waiting_ids:
            return self.snapshot
        instances = [i.using(i.kv_used + self.arriving[i.instance_id]) for i in self.snapshot.instances]
        waiting = [view for view in self.snapshot.waiting if view.request_id not in self.waiting_ids]
        return replace(self.snapshot, instances=tuple(instances), waiting=tuple(waiting))

    def added_to(self, plan: IterationPlan) -> IterationPlan:
        """Return a plan for the snapshot of `hiding`, with the moves from host tiers and to them."""
        if self.snapshot.unsaved:
            self._offload(plan)
        begun_ids = [request_id for batch in plan.batches for request_id in batch.request_ids]
        decisions = [*self.decisions, *[self.computed[r] for r in begun_ids if r in self.computed]]
        if not (self.moves or decisions):
            return plan
        return replace(
            plan,
            migrations=(*plan.migrations, *self.moves),
            decisions=(*plan.decisions, *decisions),
        )

    def _wanted(self, view: RequestView) -> Wanted:
        there = [c.segment for c in view.cached if c.segment.instance_id not in self.home]
        seen = _union(segment.positions for segment in there)
        num_cached, found = sum(map(len, seen)), list[KVSegment]()
        for segment, _ in view.cached:
            if segment.instance_id in self.home:
                rest = subtract((segment.positions,), *seen)
                found += [segment._replace(positions=positions) for positions in rest]
                seen = (*seen, *rest)
        return Wanted(view, tuple(found), num_cached)

    def _load(self, wanted: Wanted) -> None:
        """Let a request wait for its KV, if that is sooner than computing it, and move it."""
        request_id, num_tokens = wanted.view.request_id, wanted.num_tokens
        is_coming = any(_common(copy.segment, s) for copy in self.snapshot.copies for s in wanted.segments)
        loading, computing = self._seconds_to_load(wanted), self._seconds_to_compute(wanted)
        is_sooner = loading < computing and self._has_room(wanted)
        options = (Alternative("from host memory", loading), Alternative("computed", computing))
        if not (is_sooner or is_coming):
            chosen = COMPUTED.format(num_tokens)
            self.computed[request_id] = Decision(DecisionKind.LOAD, (request_id,), chosen, options)
            return
        self.waiting_ids.add(request_id)
        if not is_coming:
            chosen = LOADED.format(num_tokens)
            self.decisions.append(Decision(DecisionKind.LOAD, (request_id,), chosen, options))
        self.decisions.append(Decision(DecisionKind.WAIT, (request_id,), WAITING))
        if is_sooner:
            for segment in wanted.segments:
                self.arriving[self.home[segment.instance_id]] += self._move(
                    segment, self.home[segment.instance_id]
                )

    def _move(self, segment: KVSegment, to_id: InstanceId, most: int = MAX_MOVING_TOKENS) -> int:
        """Move some KV, except what moves or is there, as far as the link has room; return the tokens."""
        link, num_moved = (segment.instance_id, to_id), 0
        owner = self.snapshot.owners[segment.owner_id]
        moving = [m for m in (*self.snapshot.copies, *self.moves) if m.segment.owner_id == segment.owner_id]
        there = [m.segment.positions for m in moving if m.segment.instance_id == segment.instance_id]
        there += [m.segment.positions for m in moving if m.destination_id == to_id]
        for rest in subtract((segment.positions,), *there, *owner.placement.on(to_id)):
            while rest:
                num_tokens = min(
                    len(rest), MOVE_TOKENS, MAX_MOVING_TOKENS - self.on_link[link], most - num_moved
                )
                if num_tokens <= 0:
                    return num_moved
                self.moves.append(
                    KVMigration(segment._replace(positions=rest[:num_tokens]), to_id, keeps_source=True)
                )
                self.on_link[link] += num_tokens
                num_moved += num_tokens
                rest = rest[num_tokens:]
        return num_moved

    def _has_room(self, wanted: Wanted) -> bool:
        """Return whether the KV fits its instances, and the request the room that other KV leaves."""
        free, coming = self.snapshot.free, self.arriving.copy()
        for segment, is_read in wanted.view.cached:  # that stays: it counts as free
            if segment.instance_id in free and not is_read:
                coming[segment.instance_id] += len(segment.positions)
        for segment in wanted.segments:
            coming[self.home[segment.instance_id]] += len(segment.positions)
        has_place = all(num_tokens <= free[instance_id] for instance_id, num_tokens in coming.items())
        return has_place and wanted.view.num_final_tokens + self.arriving.total() <= sum(free.values())

    def _seconds_to_load(self, wanted: Wanted) -> float:
        """Return the seconds until all has come, behind what is on the links before."""
        tokens = self.on_link.copy()
        links = [(segment.instance_id, self.home[segment.instance_id]) for segment in wanted.segments]
        for link, segment in zip(links, wanted.segments, strict=True):
            tokens[link] += len(segment.positions)
        return max(self.cost_model.migration_time(tokens[link], *link) for link in links)

    def _seconds_to_compute(self, wanted: Wanted) -> float:
        """Return the seconds by which the prompt takes longer without the KV, each time at the best DoP."""
        terms = [self.cost_model.prefill_terms(n + 1) for n in range(len(self.snapshot.pools))]

        def seconds(num_cached: int) -> float:
            num_new = wanted.view.num_known_tokens - num_cached
            return min(t.time(num_new, num_new * num_cached, num_new**2) for t in terms)

        return seconds(wanted.num_cached) - seconds(wanted.num_cached + wanted.num_tokens)

    def _offload(self, plan: IterationPlan) -> None:
        """Copy KV to host tiers, in the room that a plan leaves: it cannot be evicted meanwhile."""
        left = _left_by(plan, self.snapshot)
        left.subtract(self.arriving)
        for instance_id, segments in self.snapshot.unsaved.items():
            tier_id = self.snapshot.tiers[instance_id]
            pace = self.snapshot.pools[instance_id] // MOVED_PART - self.on_link[instance_id, tier_id]
            tier = self.snapshot.instance[tier_id]  # what it keeps stays: others would push each other out
            room = tier.kv_free - tier.kv_cached - self.arriving[tier_id]
            most = min(pace, left[instance_id], room)
            for segment in segments:
                if self._is_worth_it(segment, tier_id):
                    num_moved = self._move(segment, tier_id, most)
                    most -= num_moved
                    self.arriving[tier_id] += num_moved

    def _is_worth_it(self, segment: KVSegment, tier_id: InstanceId) -> bool:
        """Return whether computing some KV again would take longer than moving it away and back."""
        num_tokens, num_before = len(segment.positions), segment.positions[0]
        terms = self.cost_model.prefill_terms(1)
        computing = terms.time(num_tokens, num_tokens * num_before, num_tokens**2)
        return computing > 2 * self.cost_model.migration_time(num_tokens, segment.instance_id, tier_id)


def _left_by(plan: IterationPlan, snapshot: Snapshot) -> Counter[InstanceId]:
    """Return the slots of each instance that a plan surely leaves."""
    left = Counter(snapshot.free)
    for batch in plan.batches:
        left.subtract(batch.num_reserved_tokens)
    for extension in plan.lease_extensions:
        left.subtract(snapshot.extended(extension).num_stored_tokens)
    for migration in plan.migrations:
        segment = migration.segment
        left[migration.destination_id] -= len(segment.positions)
        if segment.owner_id in snapshot.owners:  # a source that may be read by nobody, and counts as free
            left[segment.instance_id] -= len(segment.positions)
    for borrowing in plan.borrowings:
        left.subtract(tokens_by_instance(borrowing.segments))
    return left


def _common(a: KVSegment, b: KVSegment) -> tuple[range, ...]:
    is_same_place = (a.owner_id, a.instance_id) == (b.owner_id, b.instance_id)
    return common((a.positions,), b.positions) if is_same_place else ()


def _union(ranges: Iterable[range]) -> tuple[range, ...]:
    """Return ranges without what several have in common."""
    found: tuple[range, ...] = ()
    for positions in ranges:
        found = (*found, *subtract((positions,), *found))
    return found
