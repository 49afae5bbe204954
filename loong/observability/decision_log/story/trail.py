"""The steps of one request, from its entries in a log."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import assert_never

from msgspec.structs import replace

from loong.core.cluster_history import ChangeKind
from loong.core.cost.work import Phase
from loong.core.decision import DecisionKind
from loong.core.request import RequestId
from loong.observability.decision_log.lines import (
    ArrivedLine,
    Chunk,
    EndedLine,
    FirstTokenLine,
    InstanceDrainingLine,
    InstanceJoinedLine,
    InstanceLeftLine,
    InstanceLostLine,
    Migration,
    PlannedLine,
    Reason,
    RoomLentLine,
    RoomReturnedLine,
)
from loong.observability.decision_log.story.found import idle_ids, room_of
from loong.observability.decision_log.story.index import (
    Considered,
    Dropped,
    Entry,
    EvictedKV,
    InstanceLine,
    LogIndex,
    MovedKV,
    Ran,
)
from loong.observability.decision_log.story.part import Pause, part_of
from loong.observability.decision_log.story.steps import (
    ComputedBatches,
    Drain,
    Drop,
    End,
    Evict,
    First,
    InstanceChange,
    Loss,
    Move,
    Route,
    StoryStep,
    Wait,
    WaitedFor,
    summed,
)


def trail_of(index: LogIndex, request_id: RequestId) -> tuple[StoryStep, ...]:
    """Return the steps of a request whose arrival the log contains.

    Each batch and each migration is one step.
    """
    arrived = index.arrivals[request_id]
    trail = _Trail(index, arrived, free_since=arrived.time)
    for entry in index.entries[request_id]:
        trail.add(entry)
    return trail.closed()


@dataclass(slots=True)
class _Trail:
    """The steps so far, and the state that the next step depends on."""

    index: LogIndex
    arrived: ArrivedLine
    free_since: float  # end of its last batch or migration
    steps: list[StoryStep] = field(default_factory=list)
    is_waiting: bool = True  # without KV
    pauses: list[Pause] = field(default_factory=list)  # since its last batch
    group: tuple[int, ...] | None = None
    kv: Counter[int] = field(default_factory=Counter)
    computed_until: int = 0  # the position after the last one that it has computed
    changes: list[InstanceLine] = field(default_factory=list)  # of instances, while it waits
    considered: list[Considered] = field(default_factory=list)  # since the last step
    waits: list[Considered] = field(default_factory=list)  # since it last ran, or lost its KV

    def add(self, entry: Entry) -> None:
        """Add the log's next entry."""
        match entry:
            case Considered():
                is_wait = entry.reason.kind is DecisionKind.WAIT
                (self.waits if is_wait else self.considered).append(entry)
            case Ran():
                self._run(entry)
            case MovedKV():
                self._move(entry)
            case Dropped():
                self._drop(entry)
            case EvictedKV():
                self._evict(entry)
            case FirstTokenLine():
                self.steps.append(First(entry.time, entry.time - self.arrived.time))
                if self.is_waiting and self.arrived.choice_of is not None:
                    self.is_waiting, self.free_since = False, entry.time
                    self.changes.clear()
            case InstanceLostLine():
                self._lose(entry)
            case InstanceDrainingLine():
                self._drain(entry)
            case InstanceJoinedLine() | InstanceLeftLine() | RoomLentLine() | RoomReturnedLine():
                self._see_change(entry)
            case EndedLine():
                self._end(entry)
            case _:
                assert_never(entry)

    def closed(self) -> tuple[StoryStep, ...]:
        """Return all steps, and a last wait if the log ends during it."""
        if self.is_waiting and self.arrived.request_id not in self.index.ends:
            waited_for = self._waited_for(self.index.last_time)
            reasons, changes = self._take_reasons(), self._take_changes()
            self.steps.append(
                Wait(self.free_since, None, waited_for=waited_for, reasons=reasons, changes=changes)
            )
        return tuple(self.steps)

    def _run(self, ran: Ran) -> None:
        began = ran.time
        self._cut_at(began)
        self._leave_rest(ran.plan, began)
        part = part_of(self.index, ran, self.pauses)
        group, chunk = ran.batch.instance_ids, ran.part if isinstance(ran.part, Chunk) else None
        before = group if self.group is None else self.group
        cached = ran.batch.cached.get(self.arrived.request_id, {})
        self.steps.append(
            ComputedBatches(
                began,
                phase=Phase.DECODE if chunk is None else Phase.PREFILL,
                instance_ids=group,
                joined_ids=tuple(i for i in group if i not in before),
                left_ids=tuple(i for i in before if i not in group),
                num_idle=len(idle_ids(ran.plan.instances)),
                is_recomputed=chunk is not None and self._has_computed(chunk),
                parts=(part,),
                waited_for=self._waited_for(began),
                reasons=self._take_reasons(),
                holder_ids=ran.batch.holder_ids,
                num_repaired=0 if chunk is None else chunk.num_repaired,
                cached=cached,
            )
        )
        self.group, self.pauses = group, []
        self.kv.update(cached)
        if part.num_steps:
            self.kv.update(part.kept_on)
            self.computed_until = max(self.computed_until, part.first_position + part.num_tokens)
        self.free_since = self.index.last_time if part.until is None else part.until

    def _has_computed(self, chunk: Chunk) -> bool:
        """Return whether some of a chunk was computed before. A choice has its prompt from another."""
        return chunk.num_output_tokens > 0 or chunk.first_position < self.computed_until

    def _move(self, moved: MovedKV) -> None:
        migration, until = moved.migration, self._end_of(moved.migration)
        self._leave_rest(moved.plan, moved.time)
        end = self.index.migration_ends.get(migration.migration_id)
        route = Route(migration.source_id, migration.destination_id, migration.num_tokens)
        self.steps.append(
            Move(
                moved.time,
                until=until,
                routes=(route,),
                is_committed=end.is_committed if end is not None else None if until is None else False,
                reasons=self._take_reasons(),
            )
        )
        self.free_since = max(self.free_since, self.index.last_time if until is None else until)
        if end is not None and end.is_committed:
            self.kv[route.source_id] -= route.num_tokens
            self.kv[route.destination_id] += route.num_tokens

    def _end_of(self, migration: Migration) -> float | None:
        """Return the end of a migration, or its cancellation by a lost instance; None if the log ends
        before.
        """
        index, migration_id = self.index, migration.migration_id
        over = index.migration_ends.get(migration_id) or index.migration_losses.get(migration_id)
        return None if over is None else over.time

    def _cut_at(self, time: float) -> None:
        """End the steps in progress at a time: a batch that lost an instance, or migrations of lost KV."""
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            if isinstance(step, Move) and step.until is not None and step.until > time:
                self.steps[number] = replace(step, until=time)
            elif isinstance(step, ComputedBatches):
                part = step.parts[-1]
                if part.until is None or part.until > time:
                    self.steps[number] = replace(step, parts=(replace(part, until=time),))
                break
        self.free_since = min(self.free_since, time)

    def _drop(self, dropped: Dropped) -> None:
        plan, kv = dropped.plan, dropped.preempted.kv
        batch_ids = tuple(batch.batch_id for batch in self.index.batches_planned_at(plan.time, kv))
        kv_free, kv_capacity = room_of(plan.instances)
        reasons, why = self._take_reasons(), dropped.preempted.reason
        self.steps.append(Drop(plan.time, kv, batch_ids, kv_free, kv_capacity, reasons, why))
        self._lose_kv(plan.time)

    def _evict(self, entry: EvictedKV) -> None:
        evicted, time = entry.evicted, entry.plan.time
        self.steps.append(Evict(time, evicted.kv, evicted.num_kept, self._take_reasons()))
        if evicted.num_kept:
            self.kv -= Counter(evicted.kv)
        else:
            self._lose_kv(time)

    def _lose(self, loss: InstanceLostLine) -> None:
        """Handle the loss of an instance, which may concern this request or not."""
        batch_ids = (
            step.parts[-1].batch_id for step in reversed(self.steps) if isinstance(step, ComputedBatches)
        )
        ran_there = self.index.batch_losses.get(next(batch_ids, 0)) is loss
        num_lost = self.kv.pop(loss.instance_id, 0)
        num_kept = sum(self.kv.values())
        if ran_there or num_lost:
            self.steps.append(Loss(loss.time, loss.instance_id, loss.why, num_lost, num_kept))
            if num_kept:
                self._cut_at(loss.time)
            else:
                self._lose_kv(loss.time)
        else:
            self._see_change(loss)

    def _drain(self, drain: InstanceDrainingLine) -> None:
        num_held = self.kv[drain.instance_id]
        if num_held:
            self.steps.append(Drain(drain.time, drain.instance_id, num_held, self.kv.total() - num_held))
        else:
            self._see_change(drain)

    def _see_change(self, change: InstanceLine) -> None:
        """Keep a change that may explain the present wait."""
        if self.is_waiting:
            self.changes.append(change)

    def _end(self, ended: EndedLine) -> None:
        if self.is_waiting and ended.time > self.free_since:
            waited_for = self._waited_for(ended.time)
            reasons, changes = self._take_reasons(), self._take_changes()
            self.steps.append(
                Wait(self.free_since, ended.time, waited_for=waited_for, reasons=reasons, changes=changes)
            )
        self.steps.append(End(ended.time, ended.reason, ended.num_output_tokens))

    def _lose_kv(self, time: float) -> None:
        self._cut_at(time)
        self._rest_until(time)
        self.kv.clear()
        self.waits.clear()
        self.is_waiting, self.free_since, self.group = True, time, None

    def _leave_rest(self, plan: PlannedLine, time: float) -> None:
        """Handle a plan that puts the request into a batch at this time."""
        if not self.is_waiting:
            self._rest_until(time)
        elif time > self.free_since:
            reasons = self._take_reasons(before=plan)
            kv_free, _ = room_of(plan.instances)
            waited_for, changes = self._waited_for(time), self._take_changes()
            self.steps.append(Wait(self.free_since, time, plan.causes, kv_free, waited_for, reasons, changes))
        self.is_waiting = False
        self.changes.clear()

    def _rest_until(self, time: float) -> None:
        if time > self.free_since:
            batch_ids = self._batches_at(+self.kv, self.free_since, time)
            self.pauses.append(Pause(time - self.free_since, batch_ids))

    def _batches_at(self, instance_ids: Iterable[int], start: float, end: float) -> tuple[int, ...]:
        return tuple(batch.batch_id for batch in self.index.batches_on(instance_ids, start, end))

    def _waited_for(self, until: float) -> tuple[WaitedFor, ...]:
        """Return the reasons for waiting since the last batch, each until the policy's next reason."""
        times = [*(max(wait.plan.time, self.free_since) for wait in self.waits), until]
        reasons = [wait.reason.chosen for wait in self.waits]
        self.waits.clear()
        return summed(
            WaitedFor(reason, end - start)
            for reason, (start, end) in zip(reasons, pairwise(times), strict=True)
        )

    def _take_changes(self) -> tuple[InstanceChange, ...]:
        taken = tuple(map(_change, self.changes))
        self.changes.clear()
        return taken

    def _take_reasons(self, before: PlannedLine | None = None) -> tuple[Reason, ...]:
        """Return the distinct reasons since the last step; with `before`, only those of earlier plans."""
        taken = [entry for entry in self.considered if entry.plan is not before]
        self.considered = [entry for entry in self.considered if entry.plan is before]
        return tuple({(entry.reason.kind, entry.reason.chosen): entry.reason for entry in taken}.values())


def _change(line: InstanceLine) -> InstanceChange:
    match line:
        case InstanceLostLine():
            return InstanceChange(line.time, line.instance_id, ChangeKind.LOST, line.why)
        case InstanceJoinedLine():
            return InstanceChange(line.time, line.instance_id, ChangeKind.JOINED, line.why)
        case InstanceDrainingLine():
            return InstanceChange(line.time, line.instance_id, ChangeKind.DRAINING, line.why)
        case RoomLentLine():
            return InstanceChange(line.time, line.instance_id, ChangeKind.LENT, line.why)
        case RoomReturnedLine():
            return InstanceChange(line.time, line.instance_id, ChangeKind.RETURNED, line.why)
        case InstanceLeftLine():
            return InstanceChange(line.time, line.instance_id, ChangeKind.LEFT)
