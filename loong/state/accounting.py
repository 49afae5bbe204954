"""The accounting of `ClusterState`: instances, requests, batches, and the KV slots that they use."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter

from loong.core.attention_tasks import num_retained_tokens
from loong.core.group_changes import GroupChange, group_changes
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import Instruction, ReleaseKV
from loong.core.placement import InstanceId, KVSegment, Placement, tokens_by_instance
from loong.core.plan import BatchPlan, KVMigration
from loong.core.request import RequestId
from loong.core.snapshot import ClusterStats, RunningBatch, Snapshot
from loong.state.busy_times import BusyTimes
from loong.state.in_flight_batch import InFlightBatch
from loong.state.live_request import LiveRequest
from loong.state.request_view_cache import RequestViewCache
from loong.state.shared_kv import SharedKV


@dataclass(slots=True)
class Accounting:
    """Instances, live requests, batches and migrations in flight, and counts since the start.

    `kv_used` of an instance counts the KV of requests and the slots that batches and migrations in flight
    have reserved. `pools` and `free` are those of a snapshot, and no live request needs more than
    `most_tokens`; so no plan looks at every instance or request for them. A request to be changed is taken
    from `changing`. Batches that are `ending` are in flight too, but their instances and requests are as if
    they had ended.
    """

    instances: dict[InstanceId, ElasticInstance] = field(default_factory=dict)
    pools: dict[InstanceId, int] = field(default_factory=dict)
    free: dict[InstanceId, int] = field(default_factory=dict)
    most_tokens: int = 0
    requests: dict[RequestId, LiveRequest] = field(default_factory=dict)
    batches: dict[int, InFlightBatch] = field(default_factory=dict)
    ending: dict[int, InFlightBatch] = field(default_factory=dict)
    migrations: dict[int, KVMigration] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)  # by their names in `ClusterStats`
    num_batches_by_dop: Counter[int] = field(default_factory=Counter)
    times: BusyTimes = field(default_factory=BusyTimes)
    returning: dict[InstanceId, int] = field(default_factory=dict)
    view_cache: RequestViewCache = field(default_factory=RequestViewCache)

    def snapshot(self, now: float, version: int) -> Snapshot:
        """Return the accounting as values."""
        self.view_cache.refresh()
        snapshot = Snapshot(
            now=now,
            instances=tuple(self.instances.values()),
            waiting=tuple(self.view_cache.waiting.values()),
            running=tuple(self.view_cache.running.values()),
            batches=tuple([batch.running for batch in self.batches.values()]),
            migrations=tuple(self.migrations.values()),
            stats=self.stats,
            version=version,
            ending=tuple([batch.running for batch in self.ending.values()]),
            leaving=self._leaving(),
            returning=self.returning.copy(),
        )
        # The values of its cached properties, but copied whole instead of entry by entry.
        vars(snapshot).update(
            instance=self.instances.copy(),
            request=self.view_cache.views.copy(),
            pools=self.pools.copy(),
            free=self.free.copy(),
            most_tokens=self.most_tokens,
        )
        return snapshot

    def _leaving(self) -> Mapping[InstanceId, int]:
        ending = chain.from_iterable(batch.plan.request_ids for batch in self.ending.values())
        lives = map(self.requests.__getitem__, ending)
        held: Counter[InstanceId] = Counter()
        for live in filter(attrgetter("is_leaving"), lives):
            held.update(live.placement.tokens_by_instance())
        return held

    @property
    def stats(self) -> ClusterStats:
        """Return the counts as a value."""
        return ClusterStats(
            **self.counts,
            num_batches_by_dop=dict(self.num_batches_by_dop),
            busy_seconds=self.times.busy,
            two_prompt_groups_seconds=self.times.two_prompt_groups,
        )

    def changing(self, request_id: RequestId) -> LiveRequest:
        """Return a live request that is to be changed."""
        live = self.requests[request_id]
        self.view_cache.mark_stale(live)
        return live

    def admit(self, live: LiveRequest) -> None:
        """Add a new request, with its siblings."""
        self.most_tokens = max(self.most_tokens, live.view().num_final_tokens)
        for new in (live, *live.siblings):
            self.count(num_arrived=1)
            new.number = self.counts["num_arrived"]
            self.requests[new.request.request_id] = new
            self.view_cache.mark_stale(new)

    def join(self, instance: ElasticInstance) -> None:
        """Add a new instance."""
        self.returning.pop(instance.instance_id, None)
        self.instances[instance.instance_id] = instance
        if instance.kind is InstanceKind.FULL:
            self.pools[instance.instance_id] = instance.kv_capacity
            self.free[instance.instance_id] = instance.kv_free

    def lose(self, instance_id: InstanceId, *, returns: bool) -> None:
        """Remove an instance; if it `returns`, its slots are expected again."""
        self.count(num_losses=1)
        if returns and self.instances[instance_id].kind is InstanceKind.FULL:
            self.returning[instance_id] = self.instances[instance_id].kv_capacity
        self._remove(instance_id)

    def drain(self, instance_id: InstanceId) -> None:
        """Let an instance take nothing new."""
        self.instances[instance_id] = replace(self.instances[instance_id], is_draining=True)
        self.pools.pop(instance_id, None)
        self.free.pop(instance_id, None)

    def leave(self, instance_id: InstanceId) -> None:
        """Remove an instance that has nothing, or that was lost and is not to return."""
        self.count(num_leaves=1)
        self.returning.pop(instance_id, None)
        self._remove(instance_id)

    def _remove(self, instance_id: InstanceId) -> None:
        for by_id in (self.instances, self.pools, self.free):
            by_id.pop(instance_id, None)

    def open_batch(self, batch: InFlightBatch) -> None:
        """Add a batch in flight, with room for the KV that it will make."""
        batch_id, plan = batch.running.batch_id, batch.plan
        self.batches[batch_id] = batch
        self.reserve(plan.num_reserved_tokens)
        for instance_id in plan.group.instance_ids:
            self.instances[instance_id] = self.instances[instance_id].running(batch_id)
        group = frozenset(plan.group.instance_ids)
        self._count_batch(batch.running, group)
        for request_id in plan.request_ids:
            live = self.changing(request_id)
            live.batch_id, live.last_group = batch_id, group
        for sibling in batch.siblings:
            sibling.batch_id, sibling.last_group = batch_id, group

    def extend_batch(self, batch: InFlightBatch, plan: BatchPlan) -> None:
        """Continue a lease with `plan`, the same one with more steps, and reserve room for them."""
        self.reserve(Counter(plan.num_stored_tokens) - Counter(batch.plan.num_stored_tokens))
        batch.extend(plan)

    def close_batch(self, batch_id: int) -> tuple[LiveRequest, ...]:
        """Remove a batch from flight, and return its requests; siblings begin in any case.

        The KV it made becomes theirs. For requests that have ended, its reserved slots count instead.
        """
        batch = self._free_instances(batch_id)
        lives, all_stored = [], list[KVSegment]()
        for request_id in batch.plan.request_ids:
            live = self.changing(request_id)
            stored = batch.plan.writes_of(request_id) if live.has_ended else batch.made(live)
            live.batch_id, live.placement = None, live.placement.adding(stored)
            all_stored += stored
            lives.append(live)
        self.release(Counter(batch.plan.num_reserved_tokens) - tokens_by_instance(all_stored))
        for live in tuple(lives):
            if live.siblings and live.request.request_id in batch.sampled:
                lives += self._start_siblings(live)
        return tuple(lives)

    def void_batch(self, batch_id: int) -> InFlightBatch:
        """Remove a batch from flight that never ends; the KV that it has surely made stays."""
        if (batch := self.ending.get(batch_id)) is not None:
            for live in self.close_ending(batch_id):
                for segment in batch.plan.writes_of(live.request.request_id):
                    live.placement = live.placement.removing(segment)
            self.release(batch.plan.num_reserved_tokens)
            return batch
        batch = self._free_instances(batch_id)
        kept: Counter[InstanceId] = Counter()
        for request_id in batch.plan.request_ids:
            live = self.changing(request_id)
            made = batch.made(live) if batch.is_lease else ()
            live.batch_id, live.placement = None, live.placement.adding(made)
            kept.update(tokens_by_instance(made))
        self.count(num_computed_tokens=kept.total())
        self.release(Counter(batch.plan.num_reserved_tokens) - kept)
        for sibling in batch.siblings:
            sibling.batch_id = None
        return batch

    def _free_instances(self, batch_id: int) -> InFlightBatch:
        batch = self.batches.pop(batch_id)
        for instance_id in batch.plan.group.instance_ids:
            self.instances[instance_id] = self.instances[instance_id].running(None)
        return batch

    def predict_end(self, batch_id: int, ends_at: float) -> None:
        """Show the state after the end of a batch; its tokens have no ids yet, and nothing is released."""
        self.ending[batch_id] = batch = self._free_instances(batch_id)
        batch.ends_at = ends_at
        for request_id in batch.plan.request_ids:
            live = self.changing(request_id)
            live.batch_id, live.ending_id = None, batch_id
            live.placement = live.placement.adding(batch.plan.writes_of(request_id))
            if batch.num_tokens.get(request_id) == 0 and not live.has_ended:
                live.predicted_token_time = ends_at
            if live.num_output_tokens >= live.request.sampling_params.max_tokens:
                self._leave(live)
            self.leave_if_ending(live)

    def leave_if_ending(self, live: LiveRequest) -> None:
        """Hide a request from policies if it is over, and in flight only in a batch that is ending.

        Its KV counts as `leaving` until that batch has ended.
        """
        is_resting = live.batch_id is None and not live.migration_ids
        if live.has_ended and live.ending_id is not None and is_resting:
            self._leave(live)

    def _leave(self, live: LiveRequest) -> None:
        live.is_leaving = True
        self.view_cache.drop(live)

    def close_ending(self, batch_id: int) -> tuple[LiveRequest, ...]:
        """Remove a batch from flight that was ending, and return its requests."""
        batch = self.ending.pop(batch_id)
        lives = [self.requests[request_id] for request_id in batch.plan.request_ids]
        for live in lives:
            live.ending_id, live.predicted_token_time, live.is_leaving = (
                None,
                None,
                live.has_ended and live.is_leaving,
            )
            self.view_cache.mark_stale(live)
        return tuple(lives)

    def has_predictable_end(self, batch: InFlightBatch) -> bool:
        """Return whether everything about a batch's end is known, except the tokens it samples.

        It is not for a lease, whose number of steps is open; for KV that several requests share, that is
        pushed or moves; and for a batch that waits for another to end.
        """
        if batch.is_lease or batch.plan.pushes or self.ending_on(batch.plan):
            return False
        lives = map(self.requests.__getitem__, batch.plan.request_ids)
        return not any(
            live.migration_ids or live.copied or live.siblings or live.shared is not None for live in lives
        )

    def ending_on(self, plan: BatchPlan) -> dict[int, float]:
        """Return the batches that are ending on instances of a plan, or make KV of its requests.

        Each has the time of its predicted end. KV that is made outside the group is served only after that.
        """
        if not self.ending:
            return {}
        group, request_ids = frozenset(plan.group.instance_ids), frozenset(plan.request_ids)
        return {
            batch_id: batch.ends_at
            for batch_id, batch in self.ending.items()
            if batch.ends_at is not None
            and not (
                group.isdisjoint(batch.plan.group.instance_ids)
                and request_ids.isdisjoint(batch.plan.request_ids)
            )
        }

    def are_busy(self, instance_ids: Iterable[InstanceId]) -> bool:
        """Return whether each of these instances has a batch."""
        return all(self.instances[i].batch_id is not None for i in instance_ids)

    def _start_siblings(self, primary: LiveRequest) -> list[LiveRequest]:
        """Start the siblings of a request: all KV that it has is theirs too. Returns them."""
        primary_id, siblings = primary.request.request_id, primary.siblings
        sibling_ids = [sibling.request.request_id for sibling in siblings]
        primary.siblings, primary.shared = (
            [],
            SharedKV(primary_id, primary.placement, (primary_id, *sibling_ids)),
        )
        for sibling, sibling_id in zip(siblings, sibling_ids, strict=True):
            sibling.batch_id, sibling.primary, sibling.shared = None, None, primary.shared
            sibling.placement = primary.placement.of(sibling_id)
            self.view_cache.mark_stale(sibling)
        return siblings

    def open_migration(self, migration_id: int, migration: KVMigration) -> None:
        """Add a migration in flight, with the room that it needs at its destination."""
        self.migrations[migration_id] = migration
        self.changing(migration.segment.owner_id).migration_ids.add(migration_id)
        self.reserve({migration.destination_id: len(migration.segment.positions)})

    def close_migration(self, migration_id: int) -> LiveRequest:
        """Remove a migration from flight. Returns its request; its reserved slots stay reserved."""
        migration = self.migrations.pop(migration_id)
        live = self.changing(migration.segment.owner_id)
        live.migration_ids.discard(migration_id)
        return live

    def settle(self, lives: Iterable[LiveRequest]) -> tuple[Instruction, ...]:
        """Release the requests that have ended, once nothing in flight touches them.

        KV that was copied while a batch read it is at its destination from now on.
        """
        instructions: list[Instruction] = []
        for live in lives:
            if live.batch_id is None and live.ending_id is None:
                instructions += self._switch_copied(live)
            if live.has_ended and live.is_at_rest:
                request_id = live.request.request_id
                instructions += self.drop_kv(request_id)
                self._leave_siblings(live)
                del self.requests[request_id]
                self.view_cache.drop(live)
                self.count(num_ended=1)
        return tuple(instructions)

    def _switch_copied(self, live: LiveRequest) -> list[Instruction]:
        instructions: list[Instruction] = []
        for migration in live.copied:
            segment = migration.segment
            live.placement = live.placement.moving(segment, migration.destination_id)
            self.release_kv(live, (segment,))
            instructions.append(ReleaseKV(segment.owner_id, (segment.instance_id,), segment.positions))
        if live.copied:
            live.copied.clear()
            self.view_cache.mark_stale(live)
        return instructions

    def _leave_siblings(self, live: LiveRequest) -> None:
        """Drop a sibling that ends before it begins.

        If a primary ends, its first sibling becomes the primary. It is suspected like the primary, whose
        prompt it has.
        """
        if live.primary is not None:
            live.primary.siblings = [sibling for sibling in live.primary.siblings if sibling is not live]
            self.view_cache.mark_stale(live.primary)
        elif live.siblings:
            new_primary, *rest = live.siblings
            new_primary.primary, new_primary.siblings = None, rest
            new_primary.num_losses, new_primary.suspected = live.num_losses, live.suspected
            for sibling in rest:
                sibling.primary = new_primary
            self.view_cache.mark_stale(new_primary)

    def drop_kv(self, request_id: RequestId) -> tuple[Instruction, ...]:
        """Release all KV of a request not in flight."""
        live = self.changing(request_id)
        placement, live.placement = live.placement, Placement()
        self.release_kv(live, placement.segments)
        live.shared, live.lost_until = None, 0
        holders = placement.instance_ids
        return (ReleaseKV(request_id, holders),) if holders else ()

    def release_kv(self, live: LiveRequest, segments: Iterable[KVSegment]) -> None:
        """Count the slots that a request releases as free, except those that others hold too."""
        num_tokens = tokens_by_instance(segments)
        if live.shared is not None:
            for holder_id in live.shared.holder_ids:
                self.changing(holder_id)
            num_tokens.subtract(live.shared.let_go(live.request.request_id, segments))
        self.release(num_tokens)

    def reserve(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Count slots of each instance as used."""
        for instance_id, count in num_tokens.items():
            self._use(instance_id, count)

    def release(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Count slots of each instance as free."""
        for instance_id, count in num_tokens.items():
            self._use(instance_id, -count)

    def _use(self, instance_id: InstanceId, num_tokens: int) -> None:
        instance = self.instances[instance_id]
        self.instances[instance_id] = instance.using(instance.kv_used + num_tokens)
        if instance_id in self.free:
            self.free[instance_id] -= num_tokens

    def count(self, **increments: int) -> None:
        """Add to the counts of these names."""
        for name, increment in increments.items():
            self.counts[name] += increment

    def _count_batch(self, batch: RunningBatch, group: frozenset[InstanceId]) -> None:
        plan, is_lease = batch.plan, batch.plan.num_steps > 1
        lives = [self.requests[request_id] for request_id in plan.request_ids]
        last_groups = [live.last_group for live in lives if live.last_group is not None]
        changes = group_changes(group, batch.holder_ids, last_groups)
        self.num_batches_by_dop[plan.group.dop] += 1
        self.count(
            num_scale_ups=GroupChange.GREW in changes,
            num_scale_downs=GroupChange.SHRANK in changes,
            num_hand_overs=GroupChange.HANDED_OVER in changes,
            num_retained_tokens=0 if is_lease else num_retained_tokens(plan),
            num_pushed_tokens=sum(len(push.segment.positions) for push in plan.pushes),
            num_served_tokens=_num_tokens_outside(group, lives) if batch.holder_ids else 0,
            num_leases=is_lease,
            num_multi_master_leases=is_lease and len({block.master_id for block in plan.queries}) > 1,
            num_served_leases=is_lease and bool(batch.holder_ids),
        )


def _num_tokens_outside(group: frozenset[InstanceId], lives: Iterable[LiveRequest]) -> int:
    segments = chain.from_iterable(live.placement.segments for live in lives)
    return sum(len(segment.positions) for segment in segments if segment.instance_id not in group)
