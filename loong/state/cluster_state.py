"""The one mutable object of the domain: events in, instructions out."""

from operator import attrgetter
from typing import assert_never

from loong.core.applied import PLANNED, UNPLANNED, Applied
from loong.core.check_plan import check_plan
from loong.core.errors import InvalidEventError, InvalidPlanError
from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Event,
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    MigrationFinished,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import (
    ExtendLease,
    Instruction,
    MoveKV,
    ReleaseKV,
    RunBatch,
    RunScoredBatch,
    StopLease,
)
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, LeaseExtension
from loong.core.request import Request, RequestId
from loong.core.snapshot import RunningBatch, Snapshot
from loong.state.accounting import Accounting
from loong.state.check_state import check_accounting
from loong.state.in_flight_batch import InFlightBatch
from loong.state.live_request import LiveRequest
from loong.state.losses import evict, lose_instance

_finish_reason = attrgetter("finish_reason")


class ClusterState:
    """Instances, live requests, batches and migrations in flight.

    `apply` takes an event and `commit` a plan; both return the instructions for the executor.
    """

    def __init__(self, instances: tuple[ElasticInstance, ...] = (), last_id: int = 0) -> None:
        """Number batches and migrations from `last_id` + 1: workers take no number twice."""
        self._accounting = Accounting()
        self._version = 0
        self.last_id = last_id
        for instance in instances:
            self._join(instance)

    def snapshot(self, now: float) -> Snapshot:
        """Return the state as values."""
        return self._accounting.snapshot(now, self._version)

    def apply(self, event: Event) -> Applied:
        """Apply an event. Raises `InvalidEventError` if it contradicts the state."""
        applied = self._take_in(event)
        self._version += 1
        return applied

    def commit(self, plan: IterationPlan, snapshot: Snapshot) -> tuple[Instruction, ...]:
        """Carry out a plan made for `snapshot`, at its time.

        Raises `InvalidPlanError`, with the state unchanged, if the state is no longer as in `snapshot`, or
        if the plan breaks a rule.
        """
        if snapshot.version != self._version:
            raise InvalidPlanError(
                f"the plan is for version {snapshot.version} of the state, but it is at {self._version}"
            )
        check_plan(snapshot, plan)
        self._version += 1
        self._accounting.count(
            num_program_calls=len(plan.program_sizes),
            num_program_calls_of_several=sum(size > 1 for size in plan.program_sizes),
        )
        instructions: list[Instruction] = []
        for preemption in plan.preemptions:
            instructions += self._accounting.drop_kv(preemption.request_id)
            self._accounting.count(num_preemptions=1)
        for failure in plan.failures:
            instructions += self._fail(failure.request_id)
        instructions += [evict(self._accounting, eviction.segment) for eviction in plan.evictions]
        instructions += [self._start_migration(migration) for migration in plan.migrations]
        instructions += [self._start_batch(batch, snapshot) for batch in plan.batches]
        instructions += [self._extend_lease(extension, snapshot) for extension in plan.lease_extensions]
        instructions += [self._end_lease(end) for end in plan.lease_ends]
        return tuple(instructions)

    def check(self) -> None:
        """Raise `InvalidEventError` unless the accounting balances."""
        check_accounting(self._accounting)

    def _take_in(self, event: Event) -> Applied:
        match event:
            case TokensProduced():
                return PLANNED if self._produce(event) else UNPLANNED
            case BatchStarted():
                self._see_start(event)
                return UNPLANNED
            case BatchEndPredicted():
                return PLANNED if self._predict_end(event) else UNPLANNED
            case BatchFinished():
                return self._finish_batch(event)
            case RequestArrived():
                self._arrive(event.request)
                return PLANNED
            case MigrationFinished():
                return Applied(self._finish_migration(event))
            case RequestAborted():
                return Applied(self._abort(event.request_id))
            case InstanceLost():
                return lose_instance(self._accounting, event)
            case InstanceJoined():
                self._join(event.instance)
                self._accounting.count(num_joins=int(event.instance.kind is InstanceKind.FULL))
                return PLANNED
            case InstanceDraining():
                self._drain(event.instance_id)
                return PLANNED
            case InstanceLeft():
                self._leave(event)
                return PLANNED
            case _:
                assert_never(event)

    def _arrive(self, request: Request) -> None:
        first, *others = request.choices()
        for choice in (first, *others):
            if choice.request_id in self._accounting.requests:
                raise InvalidEventError(f"request {choice.request_id} arrived twice")
        primary = LiveRequest(first)
        primary.siblings = [LiveRequest(choice, primary=primary) for choice in others]
        self._accounting.admit(primary)

    def _produce(self, event: TokensProduced) -> bool:
        """Add tokens; return whether a policy may act on them.

        It may if they end a request, or if their lease is near its end. It may not if the end of their batch
        was predicted, as that end comes with them.
        """
        batch = self._in_flight(event.batch_id)
        if batch is None:
            raise InvalidEventError(f"tokens came from batch {event.batch_id}, which is not running")
        lives = batch.take_step(event.step, event.tokens, event.time)
        for live in lives:
            live.predicted_token_time = None
            if live.num_losses:
                live.clear()
            if not live.is_view_stale:  # true for most; a call would cost more
                self._accounting.view_cache.mark_stale(live)
            if live.has_ended:
                self._accounting.leave_if_ending(live)
        self._accounting.counts["num_output_tokens"] += len(lives)
        if event.batch_id in self._accounting.ending:
            return False
        return batch.has_come_near_its_end(event.step) or any(map(_finish_reason, event.tokens))

    def _see_start(self, event: BatchStarted) -> None:
        batch = self._in_flight(event.batch_id)
        if batch is None:
            raise InvalidEventError(f"batch {event.batch_id} started, but is not in flight")
        batch.start(event.time)
        self._accounting.times.start(event.batch_id, batch.plan, event.time)

    def _in_flight(self, batch_id: int) -> InFlightBatch | None:
        return self._accounting.batches.get(batch_id) or self._accounting.ending.get(batch_id)

    def _predict_end(self, event: BatchEndPredicted) -> bool:
        """Predict the end of a batch, unless it has ended already; return whether its end is predicted."""
        batch = self._accounting.batches.get(event.batch_id)
        if batch is not None and self._accounting.has_predictable_end(batch):
            self._accounting.predict_end(event.batch_id, event.ends_at)
        return event.batch_id in self._accounting.ending

    def _finish_batch(self, event: BatchFinished) -> Applied:
        """End a batch.

        A predicted end needs no plan if the batch's instances have other batches and it frees no KV.
        """
        accounting, batch = self._accounting, self._in_flight(event.batch_id)
        if batch is None:
            raise InvalidEventError(f"batch {event.batch_id} finished, but is not running")
        batch.check_finished(event.num_steps)
        accounting.times.end(event.batch_id, event.time)
        for live in batch.sampled.values():
            live.is_scored = True
        accounting.count(
            num_computed_tokens=batch.num_computed_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens(batch),
        )
        is_predicted = batch.ends_at is not None
        close = accounting.close_ending if is_predicted else accounting.close_batch
        lives = close(event.batch_id)
        for live in lives:
            if live.num_losses:
                live.clear_computed()
        released = accounting.settle(lives)
        is_planned_for = is_predicted and not released and accounting.are_busy(batch.plan.group.instance_ids)
        return Applied(released, needs_plan=not is_planned_for, ended=batch.committed)

    def _num_recomputed_tokens(self, batch: InFlightBatch) -> int:
        lives = map(self._accounting.requests.__getitem__, batch.plan.request_ids)
        return sum([live.num_recomputed_tokens(batch.made(live)) for live in lives if live.lost_until])

    def _finish_migration(self, event: MigrationFinished) -> tuple[Instruction, ...]:
        migration = self._accounting.migrations.get(event.migration_id)
        if migration is None:
            raise InvalidEventError(f"migration {event.migration_id} finished, but is not running")
        live = self._accounting.close_migration(event.migration_id)
        if event.is_committed:
            self._accounting.count(num_migrated_tokens=len(migration.segment.positions))
            live.copied.append(migration)
            return self._accounting.settle((live,))
        stale = migration.arriving
        self._accounting.release_kv(live, (stale,))
        release = ReleaseKV(stale.owner_id, (stale.instance_id,), stale.positions)
        return (release, *self._accounting.settle((live,)))

    def _abort(self, request_id: RequestId) -> tuple[Instruction, ...]:
        if request_id not in self._accounting.requests:  # it finished while the client was leaving
            return ()
        live = self._accounting.changing(request_id)
        if live.has_ended:
            return ()
        live.has_ended, live.predicted_token_time = True, None
        if live.batch_id is None:
            self._accounting.leave_if_ending(live)
            return self._accounting.settle((live,))
        running = self._accounting.batches[live.batch_id].running
        next_step = running.num_steps_taken + 1
        if next_step >= running.last_step:
            return ()
        return (self._end_lease(LeaseEnd(live.batch_id, next_step)),)

    def _join(self, instance: ElasticInstance) -> None:
        if instance.instance_id in self._accounting.instances:
            raise InvalidEventError(f"instance {instance.instance_id} joined twice")
        if instance.kv_used or instance.batch_id is not None:
            raise InvalidEventError(
                f"instance {instance.instance_id} joined with {instance.kv_used} tokens and batch "
                f"{instance.batch_id}; it must come empty"
            )
        self._accounting.join(instance)

    def _drain(self, instance_id: InstanceId) -> None:
        instance = self._accounting.instances.get(instance_id)
        if instance is None or instance.is_draining:
            what = "was not there" if instance is None else "does so already"
            raise InvalidEventError(f"instance {instance_id} is to drain, but {what}")
        self._accounting.drain(instance_id)

    def _leave(self, event: InstanceLeft) -> None:
        instance_id = event.instance_id
        is_lost = instance_id in self._accounting.returning
        if not is_lost and instance_id not in self.snapshot(event.time).drained_ids:
            raise InvalidEventError(
                f"instance {instance_id} left, but it was not draining, or still has a part in some request"
            )
        self._accounting.leave(instance_id)

    def _fail(self, request_id: RequestId) -> tuple[Instruction, ...]:
        live = self._accounting.changing(request_id)
        live.has_ended, live.predicted_token_time = True, None
        self._accounting.leave_if_ending(live)
        self._accounting.count(num_failed=1)
        return self._accounting.settle((live,))

    def _start_migration(self, migration: KVMigration) -> MoveKV:
        migration_id = self._new_id()
        self._accounting.open_migration(migration_id, migration)
        batch_id = self._accounting.requests[migration.segment.owner_id].batch_id
        return MoveKV(migration_id, migration, batch_id)

    def _start_batch(self, plan: BatchPlan, snapshot: Snapshot) -> RunBatch:
        batch_id = self._new_id()
        lives = [self._accounting.requests[request_id] for request_id in plan.request_ids]
        inputs = tuple([live.input_for(plan) for live in lives])
        given = zip(inputs, lives, strict=True)
        sampling = [live for i, live in given if i.sampling_params is not None]
        sampled = {r.request.request_id: r for live in sampling for r in (live, *live.siblings)}
        start = max([snapshot.now, *self._accounting.ending_on(plan).values()])
        holder_ids = plan.holder_ids([live.placement for live in lives])
        running = RunningBatch(
            batch_id, plan, start, 0, last_step=plan.num_steps, stepped_at=start, holder_ids=holder_ids
        )
        asking = [live for live in lives if live.request.num_prompt_logprobs is not None]
        scored = tuple([chunk for live in asking if (chunk := live.scored_chunk(plan)) is not None])
        batch = RunScoredBatch(batch_id, plan, inputs, scored) if scored else RunBatch(batch_id, plan, inputs)
        used, stored = snapshot.instance, plan.num_stored_tokens
        reserved = tuple([(i, used[i].kv_used + stored.get(i, 0)) for i in plan.group.instance_ids])
        self._accounting.open_batch(InFlightBatch(batch, running, sampled, reserved))
        return batch

    def _extend_lease(self, extension: LeaseExtension, snapshot: Snapshot) -> ExtendLease:
        batch = self._accounting.batches[extension.batch_id]
        plan = snapshot.extended(extension)
        self._accounting.extend_batch(batch, plan)
        return ExtendLease(extension.batch_id, plan.group, plan.num_steps)

    def _end_lease(self, end: LeaseEnd) -> StopLease:
        batch = self._accounting.batches[end.batch_id]
        batch.end_before(end.step)
        return StopLease(end.batch_id, batch.plan.group, end.step)

    def _new_id(self) -> int:
        self.last_id += 1
        return self.last_id
