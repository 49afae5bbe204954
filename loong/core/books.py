"""What `ClusterState` writes down, and the entries that keep it balanced."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from loong.core.attention_tasks import num_retained_tokens
from loong.core.instance import ElasticInstance
from loong.core.instructions import Instruction, ReleaseKV
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, KVMigration
from loong.core.records import InFlightBatch, LiveRequest
from loong.core.request import RequestId
from loong.core.snapshot import ClusterStats, RunningBatch, Snapshot


@dataclass(slots=True)
class Books:
    """Instances, live requests, batches and migrations in flight, and counts since the start.

    `kv_used` of an instance counts the KV at rest and what batches and migrations in flight have reserved.
    """

    instances: dict[InstanceId, ElasticInstance] = field(default_factory=dict)
    requests: dict[RequestId, LiveRequest] = field(default_factory=dict)
    batches: dict[int, InFlightBatch] = field(default_factory=dict)
    migrations: dict[int, KVMigration] = field(default_factory=dict)
    stats: ClusterStats = field(default_factory=ClusterStats)

    def snapshot(self, now: float, version: int) -> Snapshot:
        """The books as values."""
        views = tuple(live.view() for live in self.requests.values())
        return Snapshot(
            now=now,
            instances=tuple(self.instances.values()),
            waiting=tuple(v for v in views if v.batch_id is None and not v.placement.segments),
            running=tuple(v for v in views if v.batch_id is not None or v.placement.segments),
            batches=tuple(
                RunningBatch(batch_id, b.plan, b.started_at, b.num_steps_taken, b.last_step)
                for batch_id, b in self.batches.items()
            ),
            migrations=tuple(self.migrations.values()),
            stats=self.stats,
            version=version,
        )

    def requests_of(self, plan: BatchPlan) -> tuple[LiveRequest, ...]:
        """The requests of a batch."""
        return tuple(self.requests[request_id] for request_id in plan.request_ids)

    def open_batch(self, batch: InFlightBatch) -> None:
        """Take a batch into flight, on its group, with room for the KV that it will make."""
        self.batches[batch.batch_id] = batch
        self.reserve(batch.plan.writes)
        for instance_id in batch.plan.group.instance_ids:
            self.instances[instance_id] = replace(self.instances[instance_id], batch_id=batch.batch_id)
        self._count_batch(batch.plan)
        for live in self.requests_of(batch.plan):
            live.batch_id, live.last_dop = batch.batch_id, batch.plan.group.dop

    def close_batch(self, batch_id: int) -> tuple[LiveRequest, ...]:
        """Take a batch out of flight; what it reserved counts as KV of its requests, which it returns."""
        plan = self.batches.pop(batch_id).plan
        for instance_id in plan.group.instance_ids:
            if instance_id in self.instances:
                self.instances[instance_id] = replace(self.instances[instance_id], batch_id=None)
        lives = self.requests_of(plan)
        for live in lives:
            live.batch_id = None
            live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
        return lives

    def open_migration(self, migration_id: int, migration: KVMigration) -> None:
        """Take a migration into flight, with the room that it needs at its destination."""
        self.migrations[migration_id] = migration
        self.requests[migration.segment.owner_id].migration_ids.add(migration_id)
        self.reserve((migration.arriving,))

    def close_migration(self, migration_id: int) -> LiveRequest:
        """Take a migration out of flight. Returns its request; what it reserved stays so."""
        migration = self.migrations.pop(migration_id)
        live = self.requests[migration.segment.owner_id]
        live.migration_ids.discard(migration_id)
        return live

    def settle(self, lives: Iterable[LiveRequest]) -> tuple[Instruction, ...]:
        """Release the requests that have ended or lost KV, once nothing in flight touches them."""
        instructions: list[Instruction] = []
        for live in lives:
            if live.is_at_rest and (live.has_ended or live.has_lost_kv):
                live.has_lost_kv = False
                instructions += self.drop_kv(live)
                if live.has_ended:
                    del self.requests[live.request.request_id]
                    self.count(num_ended=1)
        return tuple(instructions)

    def drop_kv(self, live: LiveRequest) -> tuple[Instruction, ...]:
        """Release all KV of a request at rest."""
        segments, holders = live.placement.segments, live.placement.instance_ids
        self.release(segments)
        live.placement = Placement()
        return (ReleaseKV(live.request.request_id, holders),) if holders else ()

    def reserve(self, segments: Iterable[KVSegment]) -> None:
        """Count the slots of `segments` as used."""
        for segment in segments:
            self._use(segment.instance_id, len(segment.positions))

    def release(self, segments: Iterable[KVSegment]) -> None:
        """Count the slots of `segments` as free."""
        for segment in segments:
            self._use(segment.instance_id, -len(segment.positions))

    def count(self, **increments: int) -> None:
        """Add to the counts of these names."""
        values = {name: getattr(self.stats, name) + n for name, n in increments.items()}
        self.stats = replace(self.stats, **values)

    def _count_batch(self, plan: BatchPlan) -> None:
        dop, dops = plan.group.dop, self.stats.num_batches_by_dop
        last_dops = (live.last_dop for live in self.requests_of(plan) if live.last_dop is not None)
        last_dop = max(last_dops, default=dop)
        self.count(
            num_scale_ups=int(dop > last_dop),
            num_scale_downs=int(dop < last_dop),
            num_retained_tokens=num_retained_tokens(plan) if plan.num_steps == 1 else 0,
        )
        self.stats = replace(self.stats, num_batches_by_dop={**dops, dop: dops.get(dop, 0) + 1})

    def _use(self, instance_id: InstanceId, num_tokens: int) -> None:
        instance = self.instances[instance_id]
        self.instances[instance_id] = replace(instance, kv_used=instance.kv_used + num_tokens)
