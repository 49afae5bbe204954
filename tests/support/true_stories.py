"""The law of all displayed times: the steps of a request or an instance have an order."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from loong.core.cluster_history import ClusterHistory
from loong.observability.decision_log.lines import Line
from loong.observability.decision_log.runs import RequestRun, RequestRuns
from loong.observability.decision_log.story.index import LogIndex, indexed
from loong.observability.decision_log.story.steps import ComputedBatches, First, Move, StoryStep, Wait
from loong.observability.decision_log.story.story import story_of
from loong.observability.decision_log.story.trail import trail_of

TOLERANCE = 1e-9  # seconds, of sums of floats


def assert_true(lines: Sequence[Line], history: ClusterHistory) -> None:
    """Check all requests that are over and all instances of a run whose log ends with nothing in flight."""
    index = indexed(lines)
    for run in _runs_over(lines):
        _check_run(run)
        _check_trail(index, run)
        _check_numbers(index, run)
    for instance_id in history.instance_ids:
        _check_instance(history, instance_id)


def _runs_over(lines: Iterable[Line]) -> list[RequestRun]:
    over: list[RequestRun] = []
    runs = RequestRuns([over.append])
    for line in lines:
        runs(line, b"")
    return over


def _check_run(run: RequestRun) -> None:
    """Arrival, start, first token and end come in this order."""
    times = [run.arrived_at, run.started_at, run.first_token_at, run.ended_at]
    known = [time for time in times if time is not None]
    assert known == sorted(known), run
    assert run.first_token_at is None or run.started_at is not None, run


def _check_trail(index: LogIndex, run: RequestRun) -> None:
    """Steps begin in order and not before the one before has ended; only moves of KV run side by side."""
    steps = trail_of(index, run.request_id)
    assert run.ended_at is not None
    begun, ended = run.arrived_at, run.arrived_at
    for step in steps:
        assert step.time >= begun, (step, steps)
        begun = step.time
        for start, end in _spans(step):
            is_beside = isinstance(step, Move) and start >= begun
            assert is_beside or start >= ended - TOLERANCE, (step, steps)
            assert start <= end <= run.ended_at + TOLERANCE or isinstance(step, Move), (step, steps)
            ended = max(ended, end)
    first = next((step for step in steps if isinstance(step, First)), None)
    if first is not None:
        assert first.time == run.first_token_at, steps
        assert all(step.time >= first.time for step in steps[steps.index(first) :]), steps


def _spans(step: StoryStep) -> Iterator[tuple[float, float]]:
    """From when to when a step takes its time, one part after the other."""
    if isinstance(step, ComputedBatches):
        for part in step.parts:
            assert part.until is not None, step
            yield part.time, part.until
    elif isinstance(step, Wait | Move):
        assert step.until is not None, step
        yield step.time, step.until


def _check_numbers(index: LogIndex, run: RequestRun) -> None:
    """Durations that are shown are none below 0, and waits and steps together are at most the latency.

    A worker measures a step from its beginning, which the engine comes to know later, and which may be before
    the end of the step before it elsewhere: only what the engine saw adds up.
    """
    story = story_of(index, run.request_id)
    summary = story.summary
    assert run.ended_at is not None
    parts = [part for step in story.steps if isinstance(step, ComputedBatches) for part in step.parts]
    assert all(part.seconds >= 0 and part.paused_seconds >= 0 for part in parts), story
    assert summary.measured_seconds >= 0, summary
    latency = run.ended_at - run.arrived_at + TOLERANCE
    assert all(part.seconds <= latency for part in parts), story
    seen = sum((part.until or part.time) - part.time for part in parts if part.num_steps)
    assert summary.waited_seconds + seen <= latency, story
    waits = [step for step in story.steps if isinstance(step, Wait)]
    reasons = [(wait, sum(reason.seconds for reason in wait.waited_for)) for wait in waits]
    assert all(0 <= said <= (wait.until or said) - wait.time + TOLERANCE for wait, said in reasons), story
    if run.ttft is not None and isinstance(story.steps[0], Wait):
        assert (story.steps[0].until or 0.0) - story.steps[0].time <= run.ttft + TOLERANCE, story
    shown = [(step.time, getattr(step, "until", None)) for step in story.steps]
    assert [time for time, _ in shown] == sorted(time for time, _ in shown), story


def _check_instance(history: ClusterHistory, instance_id: int) -> None:
    """An instance runs one batch after the other, in the order in which they were planned."""
    for before, piece in pairwise(history.on(instance_id)):
        assert before.batch_id < piece.batch_id, (before, piece)
        assert before.started_at <= before.ended_at <= piece.started_at <= piece.ended_at, (before, piece)
