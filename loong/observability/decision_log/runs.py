"""The course of each request in a few numbers, updated by each line of the log."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from loong.core.decision import DecisionKind
from loong.core.request import FinishReason, RequestId
from loong.observability.decision_log.lines import (
    ArrivedLine,
    BatchStartedLine,
    Chunk,
    Decode,
    EndedLine,
    FirstTokenLine,
    InstanceLostLine,
    Line,
    LoggedBatch,
    PlannedLine,
    TokensByInstance,
)

MAX_DOPS = 64  # changes of DoP that a request keeps


@dataclass(slots=True)
class RequestRun:
    """A request.

    Times are seconds of the run's clock, or None before the event. `dops` are the last, in order.
    """

    request_id: RequestId
    num_prompt_tokens: int
    max_tokens: int
    arrived_at: float
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    end: FinishReason | None = None
    num_output_tokens: int = 0  # known at the end
    dops: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of its prompt, read as it began
    waits_for: str | None = None  # the last reason not to run it, since its last preemption

    @property
    def ttft(self) -> float | None:
        """The seconds from its arrival to its first token."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot(self) -> float | None:
        """The mean seconds of a token after the first, for a request that has ended."""
        if self.ended_at is None or self.first_token_at is None or self.num_output_tokens < 2:
            return None
        return (self.ended_at - self.first_token_at) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class _Coming:
    """A planned batch that has not started. `choices` wait for the prompts of its `runs`."""

    instance_ids: tuple[int, ...]
    runs: list[RequestRun]
    choices: list[RequestRun]
    cached: Mapping[RequestId, TokensByInstance]


class RequestRuns:
    """A listener that follows requests, and passes each on when it has ended."""

    def __init__(self, when_over: Sequence[Callable[[RequestRun], None]] = ()) -> None:
        self._live: dict[RequestId, RequestRun] = {}
        self._choices: dict[RequestId, list[RequestRun]] = {}  # by the request whose prompt they wait for
        self._coming: dict[int, _Coming] = {}
        self._when_over = list(when_over)

    @property
    def live(self) -> Collection[RequestRun]:
        """The requests that have not ended, in the order of their arrival."""
        return self._live.values()

    def subscribe(self, listener: Callable[[RequestRun], None]) -> None:
        """Add a listener for ended requests."""
        self._when_over.append(listener)

    def __call__(self, line: Line, _encoded: bytes, /) -> None:
        """Update requests by a line."""
        match line:
            case ArrivedLine():
                come = self._live[line.request_id] = RequestRun(
                    line.request_id,
                    line.num_prompt_tokens,
                    line.max_tokens,
                    line.time,
                    line.ttft_slo,
                    line.tpot_slo,
                )
                if line.choice_of is not None:
                    self._choices.setdefault(line.choice_of, []).append(come)
            case PlannedLine():
                self._note_waits(line)
                self._coming.update((batch.batch_id, self._come(batch)) for batch in line.batches)
            case BatchStartedLine():
                if (coming := self._coming.pop(line.batch_id, None)) is not None:
                    _start(coming, line.time)
            case InstanceLostLine():
                for batch_id in line.void_batch_ids:
                    self._coming.pop(batch_id, None)
            case FirstTokenLine():
                if (run := self._live.get(line.request_id)) is not None:
                    run.first_token_at = line.time
            case EndedLine():
                self._end(line)
            case _:
                pass

    def live_run(self, request_id: RequestId) -> RequestRun | None:
        """Return a request that has not ended, or None."""
        return self._live.get(request_id)

    def _come(self, batch: LoggedBatch) -> "_Coming":
        parts: tuple[Chunk | Decode, ...] = (*batch.chunks, *batch.decodes)
        runs = [run for part in parts if (run := self._live.get(part.request_id)) is not None]
        choices = [choice for run in runs for choice in self._choices.get(run.request_id, ())]
        return _Coming(batch.instance_ids, runs, choices, batch.cached)

    def _note_waits(self, plan: PlannedLine) -> None:
        for preempted in plan.preempted:
            if (run := self._live.get(preempted.request_id)) is not None:
                run.num_preemptions, run.waits_for = run.num_preemptions + 1, None
        for reason in plan.reasons:
            if reason.kind is DecisionKind.WAIT:
                for request_id in reason.request_ids:
                    if (run := self._live.get(request_id)) is not None:
                        run.waits_for = reason.chosen

    def _end(self, ended: EndedLine) -> None:
        if (run := self._live.pop(ended.request_id, None)) is not None:
            self._leave_choices(run)
            run.ended_at, run.end, run.num_output_tokens = ended.time, ended.reason, ended.num_output_tokens
            for listener in self._when_over:
                listener(run)

    def _leave_choices(self, run: RequestRun) -> None:
        """Let the next choice compute the prompt of all choices that wait for this one."""
        waiting = [choice for choice in self._choices.pop(run.request_id, ()) if choice.end is None]
        if waiting:
            heir, *others = waiting
            self._choices[heir.request_id] = others


def _start(coming: _Coming, time: float) -> None:
    dop = len(coming.instance_ids)
    for run in (*coming.runs, *coming.choices):
        if run.started_at is None and run.end is None:
            run.started_at = time
            run.num_cached_tokens = sum(coming.cached.get(run.request_id, {}).values())
    for run in coming.runs:
        if not run.dops or run.dops[-1] != dop:
            run.dops.append(dop)
            del run.dops[:-MAX_DOPS]
