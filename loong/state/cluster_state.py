"""The one mutable object of the domain: events in, instructions out."""

from operator import attrgetter
from typing import assert_never

from loong.core.applied import PLANNED, UNPLANNED, Applied
from loong.core.check_plan import check_plan
from loong.core.decision import Decision
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
    PrefixCacheReset,
    RequestAborted,
    RequestArrived,
    RoomLent,
    RoomReturned,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.instructions import Instruction, ReleaseWindows
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.request import FinishReason
from loong.core.snapshot import Snapshot
from loong.core.window_memory import WindowMemory
from loong.state.accounting import Accounting
from loong.state.check_state import check_accounting
from loong.state.loans import change_room
from loong.state.losses import lose_instance
from loong.state.misses import reasons_of_misses
from loong.state.owners import GoneCause
from loong.state.prefix_tree import PrefixTree

_finish_reason = attrgetter("finish_reason")


class ClusterState:
    """Instances, live requests, batches and migrations in flight.

    `apply` takes an event and `commit` a plan; both return the instructions for the executor.
    """

    def __init__(
        self,
        instances: tuple[ElasticInstance, ...] = (),
        last_id: int = 0,
        *,
        keeps_prefixes: bool = False,
        least_saved: int | None = 1,
        windows: WindowMemory | None = None,
    ) -> None:
        """Number batches and migrations from `last_id` + 1: workers take no number twice.

        With `keeps_prefixes`, KV stays when its request has ended. Others are as for `LiveRequests`.
        """
        accounting = Accounting(windows, keeps_prefixes=keeps_prefixes, least_saved=least_saved)
        self._accounting, self._pools, self._requests = accounting, accounting.pools, accounting.requests
        self._flights, self._counts = accounting.flights, accounting.counts
        self._lengths = accounting.lengths
        self._version, self.last_id = 0, last_id
        for instance in instances:
            self._pools.join(instance)

    @property
    def keeps_prefixes(self) -> bool:
        """Return whether KV stays when its request has ended."""
        return self._requests.owners.keeps

    @property
    def owners(self) -> PrefixTree:
        """Return the owners of cached KV, for observers that look at them."""
        return self._requests.owners

    def snapshot(self, now: float) -> Snapshot:
        """Return the state as values."""
        return self._accounting.snapshot(now, self._version)

    def apply(self, event: Event) -> Applied:
        """Apply an event. Raises `InvalidEventError` if it contradicts the state."""
        self._requests.owners.now = event.time
        applied = self._take_in(event)
        if applied.needs_plan:
            self._requests.owners.find_new()
        self._version += 1
        if of_owners := self._of_owners():
            return applied._replace(instructions=(*of_owners, *applied.instructions))
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
        self._requests.owners.now = snapshot.now
        snapshot = snapshot.after(plan)
        self._version += 1
        self._counts.add(
            num_program_calls=len(plan.program_sizes),
            num_program_calls_of_several=sum(size > 1 for size in plan.program_sizes),
            num_failed=len(plan.failures),
        )
        self._counts.add_preemptions(preemption.reason for preemption in plan.preemptions)
        requests, flights = self._requests, self._flights
        instructions: list[Instruction] = []
        for borrowing in plan.effective_borrowings:
            self._counts.add(num_cached_tokens=requests.borrow(borrowing))
        migrations = [(self._new_id(), migration) for migration in plan.migrations]
        for migration_id, migration in migrations:
            requests.copies.pin(migration_id, migration)
        for eviction in plan.evictions:
            instructions += requests.evict(eviction.segment)
        for preemption in plan.preemptions:  # its KV may take the place of what nothing reads
            instructions += requests.preempt(preemption.request_id)
        for failure in plan.failures:
            instructions += requests.end(requests.changing(failure.request_id))
        instructions += [flights.open_batch(self._new_id(), batch, snapshot) for batch in plan.batches]
        self._accounting.trim_windows(plan.migrations)
        instructions += [flights.open_migration(*numbered) for numbered in migrations]
        instructions += [flights.extend_lease(extension, snapshot) for extension in plan.lease_extensions]
        instructions += [flights.end_lease(end) for end in plan.lease_ends]
        instructions += self._accounting.begin_broken_anew(plan.evictions)
        preempted = self._accounting.make_room()
        return (*self._of_owners(), *preempted, *instructions)

    def misses(self, plan: IterationPlan) -> tuple[Decision, ...]:
        """Return why requests that begin with a plan, just committed, read less cached KV than they could."""
        return reasons_of_misses(self._requests, plan)

    def observe_length(self, max_tokens: int, length: int) -> None:
        """Count a complete output of a request that declared `max_tokens`."""
        self._lengths.add(max_tokens, length)

    def check(self) -> None:
        """Raise `InvalidEventError` unless the accounting balances."""
        check_accounting(self._accounting)

    def _of_owners(self) -> tuple[Instruction, ...]:
        """Return the instructions of owners, and count what they drop in layers with a window."""
        instructions = self._requests.owners.take_instructions()
        if self._accounting.windows is not None:
            dropped = [i for i in instructions if isinstance(i, ReleaseWindows)]
            num_tokens = sum(len(i.instance_ids) * len(i.positions) for i in dropped)
            self._counts.add(num_window_dropped_tokens=num_tokens)
        return instructions

    def _take_in(self, event: Event) -> Applied:
        match event:
            case TokensProduced():
                return PLANNED if self._produce(event) else UNPLANNED
            case BatchStarted():
                self._see_start(event)
                return UNPLANNED
            case BatchEndPredicted():
                is_predicted = self._flights.predict_end(event.batch_id, event.ends_at)
                return PLANNED if is_predicted else UNPLANNED
            case BatchFinished():
                return self._finish_batch(event)
            case RequestArrived():
                self._requests.arrive(event.request)
                return PLANNED
            case MigrationFinished():
                return Applied(self._finish_migration(event))
            case RequestAborted():
                return Applied(self._abort(event))
            case InstanceLost():
                return lose_instance(self._accounting, event)
            case InstanceJoined():
                self._pools.join(event.instance)
                self._counts.add(num_joins=int(event.instance.kind is not InstanceKind.HOST))
                return PLANNED
            case InstanceDraining():
                return Applied(self._drain(event.instance_id))
            case InstanceLeft():
                self._leave(event)
                return PLANNED
            case RoomLent() | RoomReturned():
                return change_room(self._accounting, event)
            case PrefixCacheReset():
                self._accounting.empty_cache()
                return PLANNED
            case _:
                assert_never(event)

    def _produce(self, event: TokensProduced) -> bool:
        """Add tokens; return whether a policy may act on them.

        It may if they end a request, or if their lease is near its end. It may not if the end of their batch
        was predicted, as that end comes with them.
        """
        batch_id, views = event.batch_id, self._requests.views
        batch = self._flights.batch(batch_id, "produced tokens")
        lives = batch.take_step(event.step, event.tokens, event.time)
        for live in lives:
            live.predicted_token_time = None
            if live.losses.num_losses:
                live.losses.clear()
            if not live.is_view_stale:  # true for most; a call would cost more
                views.mark_stale(live)
            if live.has_ended:
                self._lengths.see_end(live)
                self._requests.leave_if_ending(live)
        self._counts.add(num_output_tokens=len(lives))
        if batch.has_predicted_end:
            return False
        return batch.has_come_near_its_end(event.step) or any(map(_finish_reason, event.tokens))

    def _see_start(self, event: BatchStarted) -> None:
        batch = self._flights.batch(event.batch_id, "started")
        batch.start(event.time)
        self._counts.times.start(event.batch_id, batch.plan, event.time)

    def _finish_batch(self, event: BatchFinished) -> Applied:
        """End a batch.

        A predicted end needs no plan if the batch's instances have other batches and it frees no KV.
        """
        batch = self._flights.batch(event.batch_id, "finished")
        batch.check_finished(event.num_steps)
        self._counts.times.end(event.batch_id, event.time)
        for live in batch.sampled.values():
            live.is_scored = True
        lost = [live for live in self._requests.of(batch.plan) if live.lost]
        self._counts.add(
            num_computed_tokens=batch.num_computed_tokens,
            num_recomputed_tokens=sum([live.regain(batch.made(live)) for live in lost]),
        )
        lives = self._flights.close_batch(event.batch_id)
        for live in lives:
            if live.losses.num_losses:
                live.losses.clear_computed(live.placement.first_missing)
        released = self._requests.settle(lives)
        is_planned_for = (
            batch.has_predicted_end and not released and self._pools.are_busy(batch.plan.group.instance_ids)
        )
        return Applied(released, needs_plan=not is_planned_for, ended=batch.committed)

    def _finish_migration(self, event: MigrationFinished) -> tuple[Instruction, ...]:
        if (copied := self._flights.copies.pop(event.migration_id, None)) is not None:
            copies = self._requests.copies
            owners = copies.close(event.migration_id, copied, is_committed=event.is_committed)
            return self._requests.settle(self._requests.users_of(owners))
        migration, live = self._flights.close_migration(event.migration_id)
        if event.is_committed:
            num_tokens = len(migration.segment.positions)
            kind = self._pools.instances[migration.destination_id].kind
            num_to_memory = num_tokens if kind is InstanceKind.ATTENTION else 0
            self._counts.add(num_migrated_tokens=num_tokens, num_memory_tokens=num_to_memory)
            live.copied.append(migration)
            return self._requests.settle((live,))
        self._requests.release_arriving(live, migration)
        return self._requests.settle((live,))

    def _abort(self, event: RequestAborted) -> tuple[Instruction, ...]:
        live = self._requests.by_id.get(event.request_id)
        if live is None or live.has_ended:  # it finished while the client was leaving
            return ()
        if event.reason is FinishReason.STOP:
            self._lengths.see_end(live)
        released = self._requests.end(self._requests.changing(event.request_id))
        return released if live.batch_id is None else self._flights.cut_short(live.batch_id)

    def _drain(self, instance_id: InstanceId) -> tuple[Instruction, ...]:
        """Let an instance take nothing new. Users go to copies of its KV; what nobody reads goes."""
        self._pools.drain(instance_id)
        owners = self._requests.copies.retire_on(instance_id)
        instructions = self._requests.settle(self._requests.users_of(owners))
        self._requests.owners.empty(instance_id, GoneCause.DRAINED)
        return instructions

    def _leave(self, event: InstanceLeft) -> None:
        instance_id = event.instance_id
        is_lost = instance_id in self._pools.returning.keys() | self._pools.returning_memory.keys()
        if not is_lost and instance_id not in self.snapshot(event.time).drained_ids:
            raise InvalidEventError(
                f"instance {instance_id} left, but it was not draining, or still has a part in some request"
            )
        self._pools.leave(instance_id)
        self._counts.add(num_leaves=1)

    def _new_id(self) -> int:
        self.last_id += 1
        return self.last_id
