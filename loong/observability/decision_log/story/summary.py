"""A request in numbers."""

from collections.abc import Iterable

import msgspec

from loong.core.request import FinishReason, RequestId
from loong.observability.decision_log.story.index import LogIndex
from loong.observability.decision_log.story.steps import (
    ComputedBatches,
    Drop,
    End,
    First,
    Loss,
    Move,
    StoryStep,
    Wait,
    WaitedFor,
    summed,
)
from loong.observability.decision_log.story.trail import trail_of


class Latency(msgspec.Struct, frozen=True):
    """A latency (None: none yet) and its target (None: none), in seconds."""

    seconds: float | None
    slo: float | None
    is_late: bool


class Summary(msgspec.Struct, frozen=True):
    """A request in numbers. Times and durations are seconds, and None if the log does not contain them.

    A request waits while it is in neither a batch nor a migration, at first for its grammar to be compiled.
    The policy's reasons for it are in `waited_for`, the longest first; they may cover less than all of it.
    Cached are the tokens of its prompt that it read as it began. TPOT is the mean time of a token after the
    first. `measured_seconds` cover those of its steps that have a prediction.
    """

    request_id: RequestId
    choice_of: RequestId | None
    user: str
    arrived_at: float
    ended_at: float | None
    end: FinishReason | None
    num_prompt_tokens: int
    max_tokens: int
    num_output_tokens: int | None
    waited_seconds: float
    waited_for: tuple[WaitedFor, ...]
    ttft: Latency
    tpot: Latency
    dops: tuple[int, ...]
    num_preemptions: int
    num_losses: int
    num_moved_tokens: int
    measured_seconds: float
    predicted_seconds: float
    grammar_seconds: float = 0.0
    num_cached_tokens: int = 0


def summary_of(index: LogIndex, request_id: RequestId) -> Summary:
    """Return the summary of a request whose arrival the log contains."""
    arrived, steps = index.arrivals[request_id], trail_of(index, request_id)
    end = next((step for step in steps if isinstance(step, End)), None)
    last_time = index.last_time if end is None else end.time
    runs = [step for step in steps if isinstance(step, ComputedBatches)]
    parts = [part for run in runs for part in run.parts if part.predicted_seconds is not None]
    return Summary(
        request_id,
        arrived.choice_of,
        arrived.user,
        arrived_at=arrived.time,
        ended_at=None if end is None else end.time,
        end=None if end is None else end.reason,
        num_prompt_tokens=arrived.num_prompt_tokens,
        max_tokens=arrived.max_tokens,
        num_output_tokens=None if end is None else end.num_output_tokens,
        waited_seconds=_waited(steps, last_time),
        waited_for=summed(
            wait for step in steps if isinstance(step, Wait | ComputedBatches) for wait in step.waited_for
        ),
        ttft=_ttft(steps, arrived.ttft_slo, last_time - arrived.time),
        tpot=_tpot(steps, arrived.tpot_slo),
        dops=tuple(sorted({len(run.instance_ids) for run in runs})),
        num_preemptions=sum(isinstance(step, Drop) for step in steps),
        num_losses=sum(isinstance(step, Loss) for step in steps),
        num_moved_tokens=_moved(steps),
        measured_seconds=sum(part.seconds for part in parts),
        predicted_seconds=sum(part.num_steps * (part.predicted_seconds or 0.0) for part in parts),
        grammar_seconds=arrived.grammar_seconds,
        num_cached_tokens=sum(runs[0].cached.values()) if runs else 0,
    )


def _ttft(steps: Iterable[StoryStep], slo: float | None, seen_for: float) -> Latency:
    """Return the TTFT. A request without a token is late after its target."""
    seconds = next((step.ttft for step in steps if isinstance(step, First)), None)
    waited = seen_for if seconds is None else seconds
    return Latency(seconds, slo, is_late=slo is not None and waited > slo)


def _tpot(steps: Iterable[StoryStep], slo: float | None) -> Latency:
    """Return the TPOT, or None for an aborted request, whose last token has no known time."""
    first, seconds = None, None
    for step in steps:
        if isinstance(step, First):
            first = step
        elif (
            isinstance(step, End)
            and first is not None
            and step.reason is not FinishReason.ABORT
            and step.num_output_tokens > 1
        ):
            seconds = (step.time - first.time) / (step.num_output_tokens - 1)
    return Latency(seconds, slo, is_late=slo is not None and seconds is not None and seconds > slo)


def _waited(steps: Iterable[StoryStep], last_time: float) -> float:
    seconds = 0.0
    for step in steps:
        if isinstance(step, Wait):
            seconds += (last_time if step.until is None else step.until) - step.time
        elif isinstance(step, ComputedBatches):
            seconds += sum(part.paused_seconds for part in step.parts)
    return seconds


def _moved(steps: Iterable[StoryStep]) -> int:
    moves = (step for step in steps if isinstance(step, Move) and step.is_committed)
    return sum(route.num_tokens for move in moves for route in move.routes)
