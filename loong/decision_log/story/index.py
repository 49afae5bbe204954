"""A decision log, to be asked by request, batch and migration."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias, assert_never

from loong.core.request import RequestId
from loong.decision_log.lines import (
    Arrived,
    Batch,
    BatchEnded,
    Chunk,
    Decode,
    Ended,
    FirstToken,
    InstanceJoined,
    InstanceLost,
    Line,
    Migration,
    MigrationEnded,
    Planned,
    Preempted,
    Reason,
    Started,
)


@dataclass(frozen=True, slots=True)
class Ran:
    """A plan ran a batch with a part of the request."""

    plan: Planned
    batch: Batch
    part: Chunk | Decode


@dataclass(frozen=True, slots=True)
class Moved:
    """A plan moved KV of the request."""

    plan: Planned
    migration: Migration


@dataclass(frozen=True, slots=True)
class Dropped:
    """A plan dropped the KV of the request."""

    plan: Planned
    preempted: Preempted


@dataclass(frozen=True, slots=True)
class Considered:
    """A plan says why something is so for the request."""

    plan: Planned
    reason: Reason


Entry: TypeAlias = Ran | Moved | Dropped | Considered | FirstToken | Ended | InstanceLost


@dataclass(slots=True)
class LogIndex:
    """What a log says, by what it says it of. `entries` are in the order of the log, as are all others.

    Every loss of an instance is among the entries of every request that was live. A batch has an end, a loss
    that cut it off, or neither where the log ends first.
    """

    clock_start: float | None = None
    last_time: float = 0.0
    arrivals: dict[RequestId, Arrived] = field(default_factory=dict)
    entries: defaultdict[RequestId, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[RequestId, Ended] = field(default_factory=dict)
    arrived_at: dict[RequestId, int] = field(default_factory=dict)  # numbers of lines
    started_at: dict[RequestId, int] = field(default_factory=dict)
    ended_at: dict[RequestId, int] = field(default_factory=dict)
    batches: dict[int, tuple[Planned, Batch]] = field(default_factory=dict)
    batch_times: list[float] = field(default_factory=list)  # when each of `batches` began
    batch_ends: dict[int, BatchEnded] = field(default_factory=dict)
    batch_losses: dict[int, InstanceLost] = field(default_factory=dict)
    migration_ends: dict[int, MigrationEnded] = field(default_factory=dict)
    lease_ends: dict[int, Planned] = field(default_factory=dict)  # the first plan that ended a lease
    lease_steps: dict[int, int] = field(default_factory=dict)  # that leases may have had which were extended

    def max_steps(self, batch: Batch) -> int:
        """Steps that a batch might have taken, as it was told last."""
        return self.lease_steps.get(batch.batch_id, batch.num_steps)

    def batches_on(self, instance_ids: Iterable[int], start: float, end: float) -> tuple[Batch, ...]:
        """The batches with any of these instances that began from `start` on and before `end`."""
        first, last = bisect_left(self.batch_times, start), bisect_left(self.batch_times, end)
        began = islice(self.batches.values(), first, last)
        return tuple(batch for _, batch in began if not set(instance_ids).isdisjoint(batch.instance_ids))


def indexed(lines: Iterable[Line]) -> LogIndex:
    """The index of the lines of one run."""
    index = LogIndex()
    for number, line in enumerate(lines):
        _add(index, number, line)
    return index


def _add(index: LogIndex, number: int, line: Line) -> None:
    match line:
        case Started():
            index.clock_start = line.clock_start
            return
        case Arrived():
            index.arrivals[line.request_id] = line
            index.arrived_at[line.request_id] = number
        case Planned():
            _add_plan(index, number, line)
        case BatchEnded():
            index.batch_ends[line.batch_id] = line
        case MigrationEnded():
            index.migration_ends[line.migration_id] = line
        case FirstToken():
            index.entries[line.request_id].append(line)
        case Ended():
            index.entries[line.request_id].append(line)
            index.ends[line.request_id] = line
            index.ended_at[line.request_id] = number
        case InstanceLost():
            _add_loss(index, line)
        case InstanceJoined():
            pass
        case _:
            assert_never(line)
    index.last_time = max(index.last_time, line.time)


def _add_plan(index: LogIndex, number: int, plan: Planned) -> None:
    for reason in plan.reasons:
        for request_id in reason.request_ids:
            index.entries[request_id].append(Considered(plan, reason))
    for preempted in plan.preempted:
        index.entries[preempted.request_id].append(Dropped(plan, preempted))
    for migration in plan.migrations:
        index.entries[migration.request_id].append(Moved(plan, migration))
    for batch in plan.batches:
        index.batches[batch.batch_id] = plan, batch
        index.batch_times.append(plan.time)
        parts: tuple[Chunk | Decode, ...] = (*batch.chunks, *batch.decodes)
        for part in parts:
            index.started_at.setdefault(part.request_id, number)
            index.entries[part.request_id].append(Ran(plan, batch, part))
    for end in plan.ended_leases:
        index.lease_ends.setdefault(end.batch_id, plan)
    for extended in plan.extended_leases:
        index.lease_steps[extended.batch_id] = extended.num_steps


def _add_loss(index: LogIndex, loss: InstanceLost) -> None:
    for request_id in index.arrivals.keys() - index.ends.keys():
        index.entries[request_id].append(loss)
    for batch_id in index.batches.keys() - index.batch_ends.keys() - index.batch_losses.keys():
        if loss.instance_id in index.batches[batch_id][1].instance_ids:
            index.batch_losses[batch_id] = loss
