"""Virtual time: what a cluster would tell, by the cost model's clock."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import assert_never

from loong.core.cost_model import CostModel
from loong.core.events import (
    BatchFinished,
    Drained,
    Event,
    MigrationFinished,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instructions import Instruction, MoveKV, ReleaseKV, RequestInput, RunBatch, StopLease
from loong.core.plan import BatchPlan
from loong.core.request import FinishReason, Request, RequestId
from loong.core.work import step_work


@dataclass(slots=True)
class _Running:
    """A batch in flight, and the inputs of the requests that have not left it."""

    plan: BatchPlan
    live: dict[RequestId, RequestInput]
    last_step: int
    num_steps_taken: int = 0


class SimulatedExecutor:
    """An `Executor` without workers: deterministic, and as quick as its policy.

    Requests arrive at their `arrival_time`, and both iterables are in order of time; arrivals are drawn one
    by one. Every request produces its `max_tokens`: the ids of its output tokens count up from 0 and stop
    nothing. A lease is timed by the KV before it.
    """

    def __init__(
        self, cost_model: CostModel, arrivals: Iterable[Request], aborts: Iterable[RequestAborted] = ()
    ) -> None:
        self._cost_model = cost_model
        self._arrivals = iter(arrivals)
        self._running: dict[int, _Running] = {}
        self._due: list[tuple[float, int, Event]] = []
        self._order = count()
        self._now = 0.0
        for abort in aborts:
            self._schedule(abort)
        self._draw_arrival()

    @property
    def now(self) -> float:
        """Virtual seconds: when the last event told has happened."""
        return self._now

    async def next_event(self) -> Event | Drained:
        """What happens next, at once."""
        if not self._due:
            return Drained()
        self._now, _, event = heapq.heappop(self._due)
        match event:
            case RequestArrived():
                self._draw_arrival()
            case TokensProduced():
                self._end_step(event)
            case _:
                pass
        return event

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Put what follows from these on the clock."""
        for instruction in instructions:
            match instruction:
                case RunBatch():
                    live = {given.request_id: given for given in instruction.inputs}
                    running = _Running(instruction.plan, live, last_step=instruction.plan.num_steps)
                    self._running[instruction.batch_id] = running
                    self._start_step(instruction.batch_id, running)
                case StopLease():
                    running_lease = self._running.get(instruction.batch_id)
                    if running_lease is not None:
                        step = max(instruction.step, running_lease.num_steps_taken + 1)
                        running_lease.last_step = min(running_lease.last_step, step)
                case MoveKV():
                    migration = instruction.migration
                    seconds = self._cost_model.migration_time(
                        len(migration.segment.positions),
                        migration.segment.instance_id,
                        migration.destination_id,
                    )
                    self._schedule(
                        MigrationFinished(self._now + seconds, instruction.migration_id, is_committed=True)
                    )
                case ReleaseKV():
                    pass
                case _:
                    assert_never(instruction)

    def _schedule(self, event: Event) -> None:
        heapq.heappush(self._due, (event.time, next(self._order), event))

    def _draw_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._schedule(RequestArrived(request.arrival_time, request))

    def _start_step(self, batch_id: int, running: _Running) -> None:
        """Schedule the tokens of the step that begins now."""
        step, plan = running.num_steps_taken, running.plan
        if plan.num_steps > 1:
            plan = plan.at_step(step, running.live)
        placements = {given.request_id: given.placement for given in running.live.values()}
        time = self._now + self._cost_model.step_time(step_work(plan, placements))
        sampled = (given for given in running.live.values() if given.sampling_params is not None)
        self._schedule(TokensProduced(time, batch_id, step, tuple(_sample(given, step) for given in sampled)))

    def _end_step(self, event: TokensProduced) -> None:
        """Begin the next step at once, or finish the batch."""
        running = self._running[event.batch_id]
        running.num_steps_taken += 1
        for token in event.tokens:
            if token.finish_reason is not None:
                del running.live[token.request_id]
        if running.live and running.num_steps_taken < running.last_step:
            self._start_step(event.batch_id, running)
        else:
            del self._running[event.batch_id]
            self._schedule(BatchFinished(self._now, event.batch_id, running.num_steps_taken))


def _sample(given: RequestInput, step: int) -> ProducedToken:
    """The output token that a request produces in a step of its batch."""
    assert given.sampling_params is not None, "only requests that sample come here"
    token_id = given.num_output_tokens + step
    is_last = token_id + 1 >= given.sampling_params.max_tokens
    return ProducedToken(given.request_id, token_id, FinishReason.LENGTH if is_last else None)
