"""The one mutable object of the domain: events in, instructions out."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from loong.core.attention_tasks import num_retained_tokens
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
from loong.core.positions import first_overlap
from loong.core.records import InFlightBatch, LiveRequest
from loong.core.request import Request, RequestId
from loong.core.snapshot import ClusterStats, RunningBatch, Snapshot


class ClusterState:
    """Instances, live requests, batches and migrations in flight.

    `apply` takes an event and `commit` a plan; both return what the executor must do. `kv_used` of an
    instance counts the KV at rest and what batches and migrations in flight have reserved.
    """

    def __init__(self, instances: tuple[ElasticInstance, ...] = ()) -> None:
        self._instances = {instance.instance_id: instance for instance in instances}
        self._requests: dict[RequestId, LiveRequest] = {}
        self._batches: dict[int, InFlightBatch] = {}
        self._migrations: dict[int, KVMigration] = {}
        self._next_id = 0
        self._stats = ClusterStats()

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
        """Raise `InvalidEventError` unless the books balance.

        Every position of a live request has one slot, the KV used and reserved of each instance adds up and
        fits, batches and instances name each other, and every request that arrived is live or has ended once.
        """
        used: Counter[InstanceId] = Counter()
        for request_id, live in self._requests.items():
            used.update(live.placement.tokens_by_instance())
            if shared := first_overlap(s.positions for s in live.placement.segments):
                raise InvalidEventError(f"positions {shared} of request {request_id} are in two slots")
            if live.has_ended and live.is_at_rest:
                raise InvalidEventError(f"request {request_id} has ended but keeps its KV")
        for batch_id, batch in self._batches.items():
            for segment in batch.plan.writes:
                used[segment.instance_id] += len(segment.positions)
            for instance_id in batch.plan.group.instance_ids:
                if self._instances[instance_id].batch_id != batch_id:
                    raise InvalidEventError(f"instance {instance_id} does not know of its batch {batch_id}")
        for migration in self._migrations.values():
            used[migration.destination_id] += len(migration.segment.positions)
        for instance in self._instances.values():
            if instance.kv_used != used[instance.instance_id] or instance.kv_free < 0:
                raise InvalidEventError(
                    f"{instance} says it uses {instance.kv_used}, not {used[instance.instance_id]} tokens"
                )
            if instance.batch_id is not None and instance.batch_id not in self._batches:
                raise InvalidEventError(f"{instance} runs a batch that does not exist")
        if self._stats.num_arrived != self._stats.num_ended + len(self._requests):
            raise InvalidEventError(f"{self._stats} does not fit {len(self._requests)} live requests")

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
            live = self._requests[token.request_id]
            live.output_token_ids.append(token.token_id)
            live.has_ended |= token.finish_reason is not None
            batch.num_tokens[token.request_id] += 1
        batch.num_steps_taken = max(batch.num_steps_taken, event.step + 1)
        return ()

    def _finish_batch(self, event: BatchFinished) -> tuple[Instruction, ...]:
        batch = self._batches.pop(event.batch_id, None)
        if batch is None:
            raise InvalidEventError(f"batch {event.batch_id} finished, but is not running")
        self._release(batch.plan.writes)
        for request_id in batch.plan.request_ids:
            live = self._requests[request_id]
            computed = tuple(batch.computed(request_id))
            self._reserve(computed)
            live.placement = live.placement.adding(computed)
        return self._rest(batch)

    def _finish_migration(self, event: MigrationFinished) -> tuple[Instruction, ...]:
        migration = self._migrations.pop(event.migration_id, None)
        if migration is None:
            raise InvalidEventError(f"migration {event.migration_id} finished, but is not running")
        segment, live = migration.segment, self._requests[migration.segment.owner_id]
        stale = replace(segment, instance_id=migration.destination_id)
        if event.is_committed:
            live.placement = live.placement.moving(segment, migration.destination_id)
            self._count(num_migrated_tokens=len(segment.positions))
            stale = segment
        self._release((stale,))
        live.migration_ids.discard(event.migration_id)
        release = ReleaseKV(segment.owner_id, (stale.instance_id,), segment.positions)
        return (release, *self._end_if_over(live))

    def _abort(self, request_id: RequestId) -> tuple[Instruction, ...]:
        live = self._requests.get(request_id)
        if live is None or live.has_ended:  # it finished while the client was leaving
            return ()
        live.has_ended = True
        if live.batch_id is None:
            return self._end_if_over(live)
        batch = self._batches[live.batch_id]
        next_step = batch.num_steps_taken + 1
        if next_step >= batch.last_step:
            return ()
        return (self._end_lease(LeaseEnd(live.batch_id, next_step)),)

    def _lose(self, instance_id: InstanceId) -> tuple[Instruction, ...]:
        """Requests that lose any KV, or are in a batch with the instance, lose all of it and wait again."""
        if self._instances.pop(instance_id, None) is None:
            raise InvalidEventError(f"instance {instance_id} is lost, but was not there")
        void_batches = {i for i, b in self._batches.items() if instance_id in b.plan.group.instance_ids}
        hit = {r for r, live in self._requests.items() if instance_id in live.placement.instance_ids}
        hit |= {request_id for i in void_batches for request_id in self._batches[i].plan.request_ids}
        hit |= {m.segment.owner_id for m in self._migrations.values() if m.destination_id == instance_id}
        instructions: list[Instruction] = []
        for migration_id in [i for i, m in self._migrations.items() if m.segment.owner_id in hit]:
            migration = self._migrations.pop(migration_id)
            self._release((replace(migration.segment, instance_id=migration.destination_id),))
            self._requests[migration.segment.owner_id].migration_ids.discard(migration_id)
        for request_id in sorted(hit):
            instructions += self._drop_kv(self._requests[request_id])
        for batch_id in void_batches:
            batch = self._batches.pop(batch_id)
            self._release(batch.plan.writes)
            instructions += self._rest(batch)
        for request_id in sorted(hit & self._requests.keys()):
            instructions += self._end_if_over(self._requests[request_id])
        return tuple(instructions)

    def _join(self, instance: ElasticInstance) -> tuple[Instruction, ...]:
        if instance.instance_id in self._instances:
            raise InvalidEventError(f"instance {instance.instance_id} joined twice")
        self._instances[instance.instance_id] = instance
        return ()

    def _start_migration(self, migration: KVMigration) -> MoveKV:
        migration_id = self._new_id()
        self._migrations[migration_id] = migration
        self._requests[migration.segment.owner_id].migration_ids.add(migration_id)
        self._reserve((replace(migration.segment, instance_id=migration.destination_id),))
        return MoveKV(migration_id, migration)

    def _start_batch(self, plan: BatchPlan, now: float) -> RunBatch:
        batch_id = self._new_id()
        self._batches[batch_id] = InFlightBatch(plan, now, last_step=plan.num_steps)
        self._reserve(plan.writes)
        for instance_id in plan.group.instance_ids:
            self._instances[instance_id] = replace(self._instances[instance_id], batch_id=batch_id)
        requests = [self._requests[request_id] for request_id in plan.request_ids]
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
        return RunBatch(batch_id, plan, tuple(live.input_for(plan) for live in requests))

    def _end_lease(self, end: LeaseEnd) -> StopLease:
        batch = self._batches[end.batch_id]
        batch.last_step = min(batch.last_step, end.step)
        return StopLease(end.batch_id, batch.plan.group, end.step)

    def _rest(self, batch: InFlightBatch) -> tuple[Instruction, ...]:
        """The instances and requests of a batch are at rest again; those that are over end."""
        for instance_id in batch.plan.group.instance_ids:
            if instance_id in self._instances:
                self._instances[instance_id] = replace(self._instances[instance_id], batch_id=None)
        instructions: list[Instruction] = []
        for request_id in batch.plan.request_ids:
            live = self._requests[request_id]
            live.batch_id = None
            instructions += self._end_if_over(live)
        return tuple(instructions)

    def _end_if_over(self, live: LiveRequest) -> tuple[Instruction, ...]:
        """Release a request that has ended, once nothing in flight touches its KV."""
        if not (live.has_ended and live.is_at_rest):
            return ()
        del self._requests[live.request.request_id]
        self._count(num_ended=1)
        return self._drop_kv(live)

    def _drop_kv(self, live: LiveRequest) -> tuple[Instruction, ...]:
        segments, holders = live.placement.segments, live.placement.instance_ids
        self._release(segments)
        live.placement = Placement()
        alive = tuple(i for i in holders if i in self._instances)
        return (ReleaseKV(live.request.request_id, alive),) if alive else ()

    def _reserve(self, segments: Iterable[KVSegment]) -> None:
        self._account(segments, sign=1)

    def _release(self, segments: Iterable[KVSegment]) -> None:
        self._account(segments, sign=-1)

    def _account(self, segments: Iterable[KVSegment], sign: int) -> None:
        for segment in segments:
            instance = self._instances.get(segment.instance_id)
            if instance is not None:  # a lost instance has no books
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
