"""The one mutable object of the domain: events in, instructions out."""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from loong.core.attention_tasks import num_retained_tokens
from loong.core.check_books import check_books
from loong.core.check_plan import check_plan
from loong.core.errors import InvalidEventError
from loong.core.events import (
    BatchFinished,
    Event,
    InstanceJoined,
    InstanceLost,
    MigrationFinished,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance
from loong.core.instructions import Instruction, MoveKV, ReleaseKV, RunBatch, StopLease
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd
from loong.core.records import InFlightBatch, LiveRequest
from loong.core.request import Request, RequestId
from loong.core.snapshot import ClusterStats, RunningBatch, Snapshot


class ClusterState:
    """Instances, live requests, batches and migrations in flight.

    `apply` takes an event and `commit` a plan; both return what the executor must do. `kv_used` of an
    instance counts the KV at rest and what batches and migrations in flight have reserved.
    """

    def __init__(self, instances: tuple[ElasticInstance, ...] = ()) -> None:
        self._instances: dict[InstanceId, ElasticInstance] = {}
        self._requests: dict[RequestId, LiveRequest] = {}
        self._batches: dict[int, InFlightBatch] = {}
        self._migrations: dict[int, KVMigration] = {}
        self._next_id = 0
        self._stats = ClusterStats()
        for instance in instances:
            self._join(instance)

    def snapshot(self, now: float) -> Snapshot:
        """The state as values."""
        views = tuple(live.view() for live in self._requests.values())
        return Snapshot(
            now=now,
            instances=tuple(self._instances.values()),
            waiting=tuple(v for v in views if v.batch_id is None and not v.placement.segments),
            running=tuple(v for v in views if v.batch_id is not None or v.placement.segments),
            batches=tuple(
                RunningBatch(batch_id, b.plan, b.started_at, b.num_steps_taken, b.last_step)
                for batch_id, b in self._batches.items()
            ),
            migrations=tuple(self._migrations.values()),
            stats=self._stats,
        )

    def apply(self, event: Event) -> tuple[Instruction, ...]:
        """Take in what happened. Raises `InvalidEventError` if it cannot have."""
        match event:
            case RequestArrived():
                return self._arrive(event.request)
            case TokensProduced():
                return self._produce(event)
            case BatchFinished():
                return self._finish_batch(event)
            case MigrationFinished():
                return self._finish_migration(event)
            case RequestAborted():
                return self._abort(event.request_id)
            case InstanceLost():
                return self._lose(event.instance_id)
            case InstanceJoined():
                return self._join(event.instance)
            case _:
                assert_never(event)

    def commit(self, plan: IterationPlan, now: float) -> tuple[Instruction, ...]:
        """Carry out a plan. Raises `InvalidPlanError`, with the state unchanged, if it breaks a rule."""
        check_plan(self.snapshot(now), plan)
        instructions: list[Instruction] = []
        for preemption in plan.preemptions:
            live = self._requests[preemption.request_id]
            instructions += self._drop_kv(live)
            self._count(num_preemptions=1)
        instructions += [self._start_migration(migration) for migration in plan.migrations]
        instructions += [self._start_batch(batch, now) for batch in plan.batches]
        instructions += [self._end_lease(end) for end in plan.lease_ends]
        return tuple(instructions)

    def check(self) -> None:
        """Raise `InvalidEventError` unless the books balance."""
        check_books(self._instances, self._requests, self._batches, self._migrations, self._stats)

    def _arrive(self, request: Request) -> tuple[Instruction, ...]:
        if request.request_id in self._requests:
            raise InvalidEventError(f"request {request.request_id} arrived twice")
        self._requests[request.request_id] = LiveRequest(request)
        self._count(num_arrived=1)
        return ()

    def _produce(self, event: TokensProduced) -> tuple[Instruction, ...]:
        batch = self._batches.get(event.batch_id)
        if batch is None:
            raise InvalidEventError(f"tokens came from batch {event.batch_id}, which is not running")
        for token in event.tokens:
            batch.check_samples(token.request_id)
            live = self._requests[token.request_id]
            if not live.has_ended:  # an aborted one is computed until its batch ends
                batch.count_token(token.request_id, event.step)
                live.produce(token)
                self._count(num_output_tokens=1)
        batch.num_steps_taken = max(batch.num_steps_taken, event.step + 1)
        return ()

    def _finish_batch(self, event: BatchFinished) -> tuple[Instruction, ...]:
        batch = self._batches.get(event.batch_id)
        if batch is None:
            raise InvalidEventError(f"batch {event.batch_id} finished, but is not running")
        going_on = [r for r in batch.plan.request_ids if not self._requests[r].has_ended]
        batch.check_finished(going_on, event.num_steps)
        lives = self._rest(event.batch_id)
        self._count(num_computed_tokens=batch.num_computed_tokens)
        for request_id in going_on:
            for segment in batch.unused(request_id):
                self._release((segment,))
                live = self._requests[request_id]
                live.placement = live.placement.removing(segment)
        return self._settle(lives)

    def _finish_migration(self, event: MigrationFinished) -> tuple[Instruction, ...]:
        migration = self._migrations.get(event.migration_id)
        if migration is None:
            raise InvalidEventError(f"migration {event.migration_id} finished, but is not running")
        segment, stale = migration.segment, migration.arriving
        live = self._end_migration(event.migration_id)
        if event.is_committed:
            live.placement = live.placement.moving(segment, migration.destination_id)
            self._count(num_migrated_tokens=len(segment.positions))
            stale = segment
        self._release((stale,))
        release = ReleaseKV(segment.owner_id, (stale.instance_id,), segment.positions)
        return (release, *self._settle((live,)))

    def _abort(self, request_id: RequestId) -> tuple[Instruction, ...]:
        live = self._requests.get(request_id)
        if live is None or live.has_ended:  # it finished while the client was leaving
            return ()
        live.has_ended = True
        if live.batch_id is None:
            return self._settle((live,))
        batch = self._batches[live.batch_id]
        next_step = batch.num_steps_taken + 1
        if next_step >= batch.last_step:
            return ()
        return (self._end_lease(LeaseEnd(live.batch_id, next_step)),)

    def _lose(self, instance_id: InstanceId) -> tuple[Instruction, ...]:
        """Requests that lose any KV, or are in a batch with the instance, lose all of it and wait again.

        A migration between two others goes on: its request loses its KV when that has ended.
        """
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            raise InvalidEventError(f"instance {instance_id} is lost, but was not there")
        void = () if instance.batch_id is None else self._rest(instance.batch_id)
        orphans = self._void_migrations(instance_id)
        hit_ids = {live.request.request_id for live in void}
        hit_ids |= {r for r, live in self._requests.items() if instance_id in live.placement.instance_ids}
        for request_id in hit_ids:
            self._requests[request_id].lose(instance_id)
        return self._settle(live for r, live in tuple(self._requests.items()) if r in hit_ids | orphans)

    def _void_migrations(self, instance_id: InstanceId) -> frozenset[RequestId]:
        """Take the migrations of a lost instance out of flight; returns the requests they are of."""
        void = [
            i for i, m in self._migrations.items() if instance_id in (m.segment.instance_id, m.destination_id)
        ]
        owners = set()
        for migration_id in void:
            arriving = self._migrations[migration_id].arriving
            live = self._end_migration(migration_id)
            owners.add(live.request.request_id)
            if arriving.instance_id != instance_id:  # what it reserved goes when the rest goes
                live.placement = live.placement.adding((arriving,))
        return frozenset(owners)

    def _join(self, instance: ElasticInstance) -> tuple[Instruction, ...]:
        if instance.instance_id in self._instances:
            raise InvalidEventError(f"instance {instance.instance_id} joined twice")
        if instance.kv_used or instance.batch_id is not None:
            raise InvalidEventError(
                f"instance {instance.instance_id} joined with {instance.kv_used} tokens and batch "
                f"{instance.batch_id}; it must come empty"
            )
        self._instances[instance.instance_id] = instance
        return ()

    def _start_migration(self, migration: KVMigration) -> MoveKV:
        migration_id = self._new_id()
        self._migrations[migration_id] = migration
        self._requests[migration.segment.owner_id].migration_ids.add(migration_id)
        self._reserve((migration.arriving,))
        return MoveKV(migration_id, migration)

    def _start_batch(self, plan: BatchPlan, now: float) -> RunBatch:
        batch_id = self._new_id()
        requests = [self._requests[request_id] for request_id in plan.request_ids]
        inputs = tuple(live.input_for(plan) for live in requests)
        samples = frozenset(i.request_id for i in inputs if i.sampling_params is not None)
        self._batches[batch_id] = InFlightBatch(batch_id, plan, now, samples, last_step=plan.num_steps)
        self._reserve(plan.writes)
        for instance_id in plan.group.instance_ids:
            self._instances[instance_id] = replace(self._instances[instance_id], batch_id=batch_id)
        last_dop = max(
            (live.last_dop for live in requests if live.last_dop is not None), default=plan.group.dop
        )
        self._count(
            num_scale_ups=int(plan.group.dop > last_dop),
            num_scale_downs=int(plan.group.dop < last_dop),
            num_retained_tokens=num_retained_tokens(plan) if plan.num_steps == 1 else 0,
        )
        self._count_dop(plan.group.dop)
        for live in requests:
            live.batch_id, live.last_dop = batch_id, plan.group.dop
        return RunBatch(batch_id, plan, inputs)

    def _end_lease(self, end: LeaseEnd) -> StopLease:
        batch = self._batches[end.batch_id]
        batch.last_step = min(batch.last_step, end.step)
        return StopLease(end.batch_id, batch.plan.group, end.step)

    def _rest(self, batch_id: int) -> tuple[LiveRequest, ...]:
        """Take a batch out of flight; what it reserved counts as KV of its requests, which it returns."""
        plan = self._batches.pop(batch_id).plan
        for instance_id in plan.group.instance_ids:
            if instance_id in self._instances:
                self._instances[instance_id] = replace(self._instances[instance_id], batch_id=None)
        lives = tuple(self._requests[request_id] for request_id in plan.request_ids)
        for live in lives:
            live.batch_id = None
            live.placement = live.placement.adding(plan.writes_of(live.request.request_id))
        return lives

    def _end_migration(self, migration_id: int) -> LiveRequest:
        migration = self._migrations.pop(migration_id)
        live = self._requests[migration.segment.owner_id]
        live.migration_ids.discard(migration_id)
        return live

    def _settle(self, lives: Iterable[LiveRequest]) -> tuple[Instruction, ...]:
        """Release the requests that have ended or lost KV, once nothing in flight touches them."""
        instructions: list[Instruction] = []
        for live in lives:
            if live.is_at_rest and (live.has_ended or live.has_lost_kv):
                live.has_lost_kv = False
                instructions += self._drop_kv(live)
                if live.has_ended:
                    del self._requests[live.request.request_id]
                    self._count(num_ended=1)
        return tuple(instructions)

    def _drop_kv(self, live: LiveRequest) -> tuple[Instruction, ...]:
        segments, holders = live.placement.segments, live.placement.instance_ids
        self._release(segments)
        live.placement = Placement()
        return (ReleaseKV(live.request.request_id, holders),) if holders else ()

    def _reserve(self, segments: Iterable[KVSegment]) -> None:
        self._account(segments, sign=1)

    def _release(self, segments: Iterable[KVSegment]) -> None:
        self._account(segments, sign=-1)

    def _account(self, segments: Iterable[KVSegment], sign: int) -> None:
        for segment in segments:
            instance = self._instances[segment.instance_id]
            used = instance.kv_used + sign * len(segment.positions)
            self._instances[segment.instance_id] = replace(instance, kv_used=used)

    def _count(self, **increments: int) -> None:
        values = {name: getattr(self._stats, name) + n for name, n in increments.items()}
        self._stats = replace(self._stats, **values)

    def _count_dop(self, dop: int) -> None:
        counts = {**self._stats.num_batches_by_dop, dop: self._stats.num_batches_by_dop.get(dop, 0) + 1}
        self._stats = replace(self._stats, num_batches_by_dop=counts)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id
