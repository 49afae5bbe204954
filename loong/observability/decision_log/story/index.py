"""Index of a decision log by request, batch and migration."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias, assert_never

from loong.core.request import RequestId
from loong.observability.decision_log.lines import (
    ArrivedLine,
    BatchEndedLine,
    BatchStartedLine,
    Chunk,
    Decode,
    EndedLine,
    Evicted,
    FirstTokenLine,
    InstanceDrainingLine,
    InstanceJoinedLine,
    InstanceLeftLine,
    InstanceLostLine,
    Line,
    LoggedBatch,
    Migration,
    MigrationEndedLine,
    PlannedLine,
    Preempted,
    Reason,
    RoomLentLine,
    RoomReturnedLine,
    StartedLine,
)


@dataclass(frozen=True, slots=True)
class Ran:
    """A batch that a plan ran, with a part for the request, and its start."""

    plan: PlannedLine
    batch: LoggedBatch
    part: Chunk | Decode
    time: float


@dataclass(frozen=True, slots=True)
class MovedKV:
    """A migration of the request's KV, from a time on: the end of the batch that makes the KV."""

    plan: PlannedLine
    migration: Migration
    time: float


@dataclass(frozen=True, slots=True)
class Dropped:
    """A preemption of the request."""

    plan: PlannedLine
    preempted: Preempted


@dataclass(frozen=True, slots=True)
class EvictedKV:
    """An eviction of some of the request's KV."""

    plan: PlannedLine
    evicted: Evicted


@dataclass(frozen=True, slots=True)
class Considered:
    """A policy's reason that concerns the request."""

    plan: PlannedLine
    reason: Reason


InstanceLine: TypeAlias = (
    InstanceLostLine
    | InstanceJoinedLine
    | InstanceDrainingLine
    | InstanceLeftLine
    | RoomLentLine
    | RoomReturnedLine
)
"""A change of an instance."""

RoomLine: TypeAlias = InstanceJoinedLine | InstanceDrainingLine | RoomLentLine | RoomReturnedLine
"""A change by a loan between engines, with a reason."""

Entry: TypeAlias = (
    Ran | MovedKV | Dropped | EvictedKV | Considered | FirstTokenLine | EndedLine | InstanceLine
)


@dataclass(slots=True)
class LogIndex:
    """The content of a log by subject. All lists are in the order of the log.

    Every change of an instance is among the entries of every request that was live. A batch or migration has
    an end, or a loss that cut it off, or neither at the end of the log. A batch that has not started has no
    entry.
    """

    clock_start: float | None = None
    policy: str | None = None
    last_time: float = 0.0
    arrivals: dict[RequestId, ArrivedLine] = field(default_factory=dict)
    entries: defaultdict[RequestId, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[RequestId, EndedLine] = field(default_factory=dict)
    room: list[RoomLine] = field(default_factory=list)  # of loans between engines
    lost_ids: set[int] = field(default_factory=set)  # instances that are lost and not back
    lost_before: dict[RequestId, tuple[int, ...]] = field(default_factory=dict)  # those at its arrival
    arrived_at: dict[RequestId, int] = field(default_factory=dict)  # numbers of lines
    started_at: dict[RequestId, int] = field(default_factory=dict)
    ended_at: dict[RequestId, int] = field(default_factory=dict)
    batches: dict[int, tuple[PlannedLine, LoggedBatch]] = field(default_factory=dict)
    batch_starts: dict[int, float] = field(default_factory=dict)
    plan_times: list[float] = field(default_factory=list)  # for each of `batches`
    start_times: list[float] = field(default_factory=list)  # times of `batch_starts`
    batch_ends: dict[int, BatchEndedLine] = field(default_factory=dict)
    batch_losses: dict[int, InstanceLostLine] = field(default_factory=dict)
    migrations: dict[int, Migration] = field(default_factory=dict)
    migration_ends: dict[int, MigrationEndedLine] = field(default_factory=dict)
    migration_losses: dict[int, InstanceLostLine] = field(default_factory=dict)
    batch_of: dict[RequestId, int] = field(
        default_factory=dict
    )  # the latest planned batch that has not ended
    held_moves: defaultdict[int, list[MovedKV]] = field(default_factory=lambda: defaultdict(list))  # by batch
    lease_ends: dict[int, PlannedLine] = field(default_factory=dict)  # the first plan that ended a lease
    lease_steps: dict[int, int] = field(default_factory=dict)  # most steps of leases, extensions included

    def max_steps(self, batch: LoggedBatch) -> int:
        """Return the most steps of a batch, by its last instruction."""
        return self.lease_steps.get(batch.batch_id, batch.num_steps)

    def batches_on(self, instance_ids: Iterable[int], start: float, end: float) -> tuple[LoggedBatch, ...]:
        """Return the batches on any of these instances that started from `start` on and before `end`."""
        first, last = bisect_left(self.start_times, start), bisect_left(self.start_times, end)
        began = islice(self.batch_starts, first, last)
        return _on(instance_ids, (self.batches[batch_id][1] for batch_id in began))

    def batches_planned_at(self, time: float, instance_ids: Iterable[int]) -> tuple[LoggedBatch, ...]:
        """Return the batches on any of these instances that were planned at a time."""
        first, stop = bisect_left(self.plan_times, time), bisect_right(self.plan_times, time)
        return _on(instance_ids, (batch for _, batch in islice(self.batches.values(), first, stop)))


def _on(instance_ids: Iterable[int], batches: Iterable[LoggedBatch]) -> tuple[LoggedBatch, ...]:
    return tuple(batch for batch in batches if not set(instance_ids).isdisjoint(batch.instance_ids))


def indexed(lines: Iterable[Line]) -> LogIndex:
    """Return the index of the lines of one run."""
    index = LogIndex()
    for number, line in enumerate(lines):
        _add(index, number, line)
    return index


def _add(index: LogIndex, number: int, line: Line) -> None:
    match line:
        case StartedLine():
            index.clock_start = line.clock_start
            index.policy = line.policy
            return
        case ArrivedLine():
            index.arrivals[line.request_id] = line
            index.arrived_at[line.request_id] = number
            index.lost_before[line.request_id] = tuple(sorted(index.lost_ids))
        case PlannedLine():
            _add_plan(index, line)
        case BatchStartedLine():
            _add_start(index, number, line)
        case BatchEndedLine():
            index.batch_ends[line.batch_id] = line
            _close_batch(index, line.batch_id, line.time)
        case MigrationEndedLine():
            index.migration_ends[line.migration_id] = line
        case FirstTokenLine():
            index.entries[line.request_id].append(line)
        case EndedLine():
            index.entries[line.request_id].append(line)
            index.ends[line.request_id] = line
            index.ended_at[line.request_id] = number
        case InstanceLostLine():
            _add_loss(index, line)
        case (
            InstanceJoinedLine()
            | InstanceDrainingLine()
            | InstanceLeftLine()
            | RoomLentLine()
            | RoomReturnedLine()
        ):
            _add_change(index, line)
        case _:
            assert_never(line)
    index.last_time = max(index.last_time, line.time)


def _add_plan(index: LogIndex, plan: PlannedLine) -> None:
    for reason in plan.reasons:
        for request_id in reason.request_ids:
            index.entries[request_id].append(Considered(plan, reason))
    for preempted in plan.preempted:
        index.entries[preempted.request_id].append(Dropped(plan, preempted))
    for evicted in plan.evicted:
        index.entries[evicted.request_id].append(EvictedKV(plan, evicted))
    for migration in plan.migrations:
        _add_move(index, MovedKV(plan, migration, plan.time))
    for batch in plan.batches:
        index.batches[batch.batch_id] = plan, batch
        index.plan_times.append(plan.time)
        index.batch_of.update((part.request_id, batch.batch_id) for part in _parts(batch))
    for end in plan.ended_leases:
        index.lease_ends.setdefault(end.batch_id, plan)
    for extended in plan.extended_leases:
        index.lease_steps[extended.batch_id] = extended.num_steps


def _add_start(index: LogIndex, number: int, start: BatchStartedLine) -> None:
    """Add a batch to the entries of its requests, except those that have ended since the plan."""
    if start.batch_id not in index.batches:  # planned before the first line of the log
        return
    plan, batch = index.batches[start.batch_id]
    index.batch_starts[start.batch_id] = start.time
    index.start_times.append(start.time)
    for part in _parts(batch):
        if part.request_id not in index.ends:
            index.started_at.setdefault(part.request_id, number)
            index.entries[part.request_id].append(Ran(plan, batch, part, start.time))


def _parts(batch: LoggedBatch) -> tuple[Chunk | Decode, ...]:
    return (*batch.chunks, *batch.decodes)


def _add_move(index: LogIndex, moved: MovedKV) -> None:
    """Add a migration, now or at the end of the batch that makes some of its KV."""
    migration = moved.migration
    index.migrations[migration.migration_id] = migration
    batch_id = None if migration.during_batch_id else index.batch_of.get(migration.request_id)
    held = index.entries[migration.request_id] if batch_id is None else index.held_moves[batch_id]
    held.append(moved)


def _close_batch(index: LogIndex, batch_id: int, time: float) -> None:
    """Add migrations that waited for the end of a batch, except those of ended requests."""
    for moved in index.held_moves.pop(batch_id, ()):
        if moved.migration.request_id not in index.ends:
            index.entries[moved.migration.request_id].append(replace(moved, time=time))
    if batch_id in index.batches:
        for part in _parts(index.batches[batch_id][1]):
            if index.batch_of.get(part.request_id) == batch_id:
                del index.batch_of[part.request_id]


def _add_change(index: LogIndex, change: InstanceLine) -> None:
    if isinstance(change, InstanceLostLine):
        index.lost_ids.add(change.instance_id)
    elif not isinstance(change, RoomLentLine | RoomReturnedLine):
        index.lost_ids.discard(change.instance_id)
    if isinstance(change, RoomLine) and change.why:
        index.room.append(change)
    for request_id in index.arrivals.keys() - index.ends.keys():
        index.entries[request_id].append(change)


def _add_loss(index: LogIndex, loss: InstanceLostLine) -> None:
    _add_change(index, loss)
    for batch_id in index.batches.keys() & loss.void_batch_ids:
        index.batch_losses[batch_id] = loss
        index.held_moves.pop(batch_id, None)  # moves of lost KV
        _close_batch(index, batch_id, loss.time)
    for migration_id in index.migrations.keys() - index.migration_ends.keys() - index.migration_losses.keys():
        migration = index.migrations[migration_id]
        if loss.instance_id in (migration.source_id, migration.destination_id):
            index.migration_losses[migration_id] = loss
