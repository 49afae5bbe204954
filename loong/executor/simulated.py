"""A cluster in virtual time: its events, by the cost model's clock."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count, filterfalse
from math import inf
from random import Random
from typing import TypeAlias, assert_never

from loong.core.cost.cost_model import CostModel
from loong.core.errors import InvalidEventError
from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Event,
    InstanceLost,
    MigrationFinished,
    RequestArrived,
    TokensProduced,
)
from loong.core.instructions import (
    ExtendLease,
    Instruction,
    LendSlots,
    MoveKV,
    ReleaseKV,
    ReleaseWindows,
    RunBatch,
    ShareKV,
    StopLease,
)
from loong.core.placement import InstanceId
from loong.core.plan import KVMigration
from loong.core.request import FinishReason, Request, RequestId
from loong.core.void_batches import BatchParts, is_void, void_batches
from loong.executor.batch_queue import BatchQueue, Ready
from loong.executor.in_flight import InFlight, Stage, SubmittedBatch
from loong.executor.lookahead import LookaheadMargin
from loong.executor.processors import Processors
from loong.executor.simulated_batch import Sampled, SimulatedBatch
from loong.executor.simulated_steps import SimulatedSteps

_Instructions: TypeAlias = tuple[Instruction, ...]


class SimulatedExecutor:
    """An `Executor` without workers: deterministic, and as fast as its policy.

    Requests arrive at their `arrival_time`, and are drawn one by one in that order (or `InvalidEventError` is
    raised); others may be added while it runs. `incidents` (aborts, losses, joins) happen at theirs. Every
    request produces its `max_tokens`, or fewer if `output_lengths` has fewer for it. The ids of its output
    tokens count up from 0. Each
    instruction starts `plan_time` seconds after it is submitted, and a batch when its instances have ended
    the batches before. A batch takes the time of the cost model, times a random factor of median 1: `noise`
    is the standard deviation of the factor's logarithm. Ends are reported before they come by the margin
    `lookahead`; without it, none is predicted. `SimulatedSteps` say how long each step takes.
    """

    def __init__(
        self,
        cost_model: CostModel,
        arrivals: Iterable[Request],
        incidents: Iterable[Event] = (),
        *,
        processors: Processors | None = None,
        plan_time: float = 0.0,
        noise: float = 0.0,
        lookahead: LookaheadMargin | None = None,
        output_lengths: Mapping[RequestId, int] | None = None,
    ) -> None:
        self._output_lengths = {} if output_lengths is None else output_lengths
        self._plan_time, self._noise = plan_time, noise
        self._lookahead, self._in_flight = lookahead, InFlight()
        self._queue = BatchQueue(self._in_flight)
        self._random = Random(0)  # noqa: S311 - the same each time, guards nothing
        self._arrivals = iter(arrivals)
        self._drawn: Request | None = None
        self._processors = processors or Processors()
        self._steps = SimulatedSteps(cost_model, self._processors)
        self._migrations: dict[int, KVMigration] = {}
        self._due: list[tuple[float, int, Event | _Instructions]] = []
        self._order = count()
        self._now = 0.0
        for incident in incidents:
            self._schedule(incident.time, incident)
        self._draw_arrival()

    @property
    def now(self) -> float:
        """Return virtual seconds: the time of the last event."""
        return self._now

    def add_arrival(self, request: Request) -> None:
        """Let a request arrive that is not drawn. Raises `InvalidEventError` if its time has passed."""
        if request.arrival_time < self._now:
            raise InvalidEventError(
                f"request {request.request_id} arrives at {request.arrival_time:g} s, "
                f"but is drawn when it is {self._now:g} s already"
            )
        self._schedule(request.arrival_time, RequestArrived(request.arrival_time, request))

    def pause(self, seconds: float) -> None:
        """Let time pass. Raises `InvalidEventError` if something is due before."""
        if self._now + seconds > (due := min(self._processors.next_end, self._next_due)):
            raise InvalidEventError(f"{seconds:g} s are to pass from {self._now:g} s, but {due:g} s is due")
        self._now += seconds

    async def next_events(self) -> Sequence[Event]:
        """Return all events at the next moment that has any."""
        events: list[Event] = []
        while True:
            next_end, next_due = self._processors.next_end, self._next_due
            time = min(next_end, next_due)
            if time == inf or (events and time > self._now):
                return events
            self._now = time
            if next_end < next_due:
                events.append(self._end_step(self._processors.end()))
            elif (event := self._take_due()) is not None:
                events.append(event)

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Schedule the effects of instructions."""
        submitted = tuple(instructions)
        if not submitted:
            return
        if self._plan_time:
            self._schedule(self._now + self._plan_time, submitted)
        else:
            self._carry_out(submitted)

    @property
    def _next_due(self) -> float:
        return self._due[0][0] if self._due else inf

    def _take_due(self) -> Event | None:
        """Do the next due item; return its event, or None if it has none."""
        _, _, item = heapq.heappop(self._due)
        if isinstance(item, tuple):
            self._carry_out(item)
            return None
        return self._happen(item)

    def _happen(self, event: Event) -> Event | None:
        """Apply a due event and return it; None if a loss has made it void."""
        match event:
            case RequestArrived():
                if event.request is self._drawn:
                    self._draw_arrival()
            case BatchFinished():
                if self._steps.running.pop(event.batch_id, None) is None:
                    return None
                self._end_batch(self._in_flight[event.batch_id], Stage.ENDED)
            case BatchStarted() | BatchEndPredicted():
                if event.batch_id not in self._steps.running:
                    return None
            case MigrationFinished():
                if self._migrations.pop(event.migration_id, None) is None:
                    return None
            case InstanceLost():
                return replace(event, void_batch_ids=self._lose(event.instance_id))
            case _:
                pass
        return event

    def _carry_out(self, instructions: _Instructions) -> None:
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                self._in_flight.add(instruction)
            if (ready := self._queue.take(instruction)) is not None:
                self._do(ready)

    def _do(self, ready: Ready) -> None:
        match instruction := ready.instruction:
            case RunBatch():
                self._open_batch(instruction)
                if ready.begins:
                    self._begin(instruction.batch_id)
            case ExtendLease():
                if (running := self._steps.running.get(instruction.batch_id)) is not None:
                    running.last_step = instruction.num_steps
            case StopLease():
                if (running := self._steps.running.get(instruction.batch_id)) is not None:
                    step = max(instruction.step, running.num_steps_taken + 1)
                    running.last_step = min(running.last_step, step)
            case MoveKV():
                self._start_migration(instruction)
            case ReleaseKV() | ReleaseWindows() | ShareKV() | LendSlots():
                pass
            case _:
                assert_never(instruction)

    def _open_batch(self, instruction: RunBatch) -> None:
        self._in_flight[instruction.batch_id].send()
        plan, inputs = instruction.plan, instruction.inputs
        placements = {given.request_id: given.placement for given in inputs}
        sampled = [
            self._sampled(given.request_id, given.num_output_tokens, given.sampling_params.max_tokens)
            for given in inputs
            if given.sampling_params is not None
        ]
        sampled += [
            self._sampled(sibling.request_id, 0, sibling.sampling_params.max_tokens)
            for given in inputs
            for sibling in given.siblings
        ]
        slowness = self._random.lognormvariate(0.0, self._noise) if self._noise else 1.0
        self._steps.running[instruction.batch_id] = SimulatedBatch(
            plan, placements, sampled, plan.num_steps, slowness, self._now
        )

    def _sampled(self, request_id: RequestId, num_before: int, max_tokens: int) -> Sampled:
        length = self._output_lengths.get(request_id, max_tokens)
        if length < max_tokens:
            return Sampled(request_id, num_before, length, FinishReason.STOP)
        return Sampled(request_id, num_before, max_tokens, FinishReason.LENGTH)

    def _begin(self, batch_id: int) -> None:
        """Take the first step of a batch, now that its instances have ended all before."""
        self._steps.begin(batch_id, self._now)
        self._schedule(self._now, BatchStarted(self._now, batch_id))
        if self._lookahead is not None:
            plan = self._steps.running[batch_id].plan
            end = self._lookahead.predict_end(batch_id, plan, self._now, self._plan_time)
            if end is not None:
                self._schedule(end.time, end)

    def _end_batch(self, batch: SubmittedBatch, stage: Stage) -> None:
        """Start the batches that waited for one that has ended, or never will (`stage`).

        KV that a void batch was to make does not migrate.
        """
        batch_id = batch.batch_id
        batch.move_to(stage)
        self._steps.leave(batch_id)
        released = self._queue.end(batch_id)
        self._in_flight.report(batch_id)
        for ready in released.ready:
            if stage is Stage.LEFT and isinstance(ready.instruction, MoveKV):
                migration_id = ready.instruction.migration_id
                self._migrations[migration_id] = ready.instruction.migration
                self._schedule(self._now, MigrationFinished(self._now, migration_id, is_committed=False))
            else:
                self._do(ready)
        for begun in released.begun:
            if begun.batch_id in self._steps.running:
                self._begin(begun.batch_id)

    def _end_step(self, batch_id: int) -> TokensProduced:
        """Return the tokens of a step; begin the next at once, or finish the batch."""
        running = self._steps.running[batch_id]
        event = TokensProduced(self._now, batch_id, running.num_steps_taken, running.sample())
        if not self._steps.end(batch_id, self._now):
            self._schedule(self._now, BatchFinished(self._now, batch_id, running.num_steps_taken))
        return event

    def _start_migration(self, instruction: MoveKV) -> None:
        self._migrations[instruction.migration_id] = instruction.migration
        time = self._steps.move(instruction.migration, self._now)
        self._schedule(time, MigrationFinished(time, instruction.migration_id, is_committed=True))

    def _lose(self, instance_id: InstanceId) -> tuple[int, ...]:
        """Drop the batches and migrations of an instance, and later batches of the same requests.

        They never end, or never begin. Return the batches.
        """
        submitted = [i for _, _, item in self._due if isinstance(item, tuple) for i in item]
        batches = [batch.instruction for batch in self._in_flight.values()]
        batches += [instruction for instruction in submitted if isinstance(instruction, RunBatch)]
        lost = frozenset((instance_id,))
        void = void_batches(map(BatchParts.of, batches), lost)

        def is_over(instruction: Instruction) -> bool:
            return is_void(instruction, lost, void)

        self._queue.drop(is_over)
        self._due = [
            (time, order, tuple(filterfalse(is_over, item)) if isinstance(item, tuple) else item)
            for time, order, item in self._due
        ]
        in_flight = [batch for batch in self._in_flight.values() if batch.batch_id in void]
        for batch in in_flight:
            self._in_flight.void(batch)
            self._steps.cancel(batch.batch_id, self._now)
        for batch in in_flight:
            self._end_batch(batch, Stage.LEFT)
        for migration_id, migration in tuple(self._migrations.items()):
            if instance_id in (migration.segment.instance_id, migration.destination_id):
                del self._migrations[migration_id]
        return void

    def _schedule(self, time: float, item: Event | _Instructions) -> None:
        heapq.heappush(self._due, (time, next(self._order), item))

    def _draw_arrival(self) -> None:
        self._drawn = next(self._arrivals, None)
        if self._drawn is not None:
            self.add_arrival(self._drawn)
