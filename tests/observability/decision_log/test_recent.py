"""Lines that are followed one by one, and kept in memory."""

from dataclasses import replace
from pathlib import Path

from decision_logs import EventReporter, logged, prefill_two
from plans import in_group
from simulation import timed_request

from loong.core.events import RequestAborted, RequestArrived
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.plan import IterationPlan, Preemption
from loong.observability.decision_log.lines import (
    ArrivedLine,
    BatchStartedLine,
    Decode,
    InstanceLostLine,
    LoggedBatch,
    PlannedLine,
)
from loong.observability.decision_log.log import DecisionLog
from loong.observability.decision_log.recent import RecentLines, index_of
from loong.observability.decision_log.runs import MAX_DOPS, RequestRun, RequestRuns
from loong.observability.decision_log.story.story import story_of
from loong.observability.decision_log.story.words import reported

INSTANCES = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 100) for i in range(3))


def test_a_request_is_followed_from_its_arrival_to_its_end() -> None:
    over: list[RequestRun] = []
    runs = RequestRuns([over.append])
    reporter = EventReporter(DecisionLog(None, listeners=[runs]), INSTANCES)
    prefill_two(reporter)
    assert [(run.request_id, run.dops, run.ttft) for run in runs.live] == [("r000", [2], 1), ("r001", [1], 1)]
    reporter.report(RequestAborted(3.0, "r000"))
    assert [run.request_id for run in runs.live] == ["r001"]
    (run,) = over
    assert (run.started_at, run.ended_at, run.end, run.tpot) == (0.0, 3.0, "abort", None)


def test_a_request_keeps_the_last_of_its_changes_of_dop() -> None:
    runs = RequestRuns()
    runs(ArrivedLine(0.0, "r", 1, 9999, ()), b"")
    for number in range(1000):
        batch = LoggedBatch(
            number, tuple(range(1 + number % 2)), 1 + number % 2, decodes=(Decode("r", number, 0),)
        )
        runs(PlannedLine(0.0, (), (), (batch,)), b"")
        runs(BatchStartedLine(0.0, number), b"")
    (run,) = runs.live
    assert len(run.dops) == MAX_DOPS
    assert run.dops[-2:] == [1, 2]


def test_preemptions_of_a_request_are_counted() -> None:
    over: list[RequestRun] = []
    reporter = EventReporter(DecisionLog(None, listeners=[RequestRuns([over.append])]), INSTANCES)
    prefill_two(reporter)
    plan = IterationPlan(preemptions=(Preemption("r000"),))
    reporter.report(RequestAborted(3.0, "r001"), plan)
    reporter.report(RequestAborted(4.0, "r000"))
    assert {run.request_id: run.num_preemptions for run in over} == {"r000": 1, "r001": 0}


def test_a_story_is_reported_lines_in_memory() -> None:
    recent = RecentLines()
    prefill_two(EventReporter(DecisionLog(None, listeners=[recent]), INSTANCES))
    story = story_of(index_of(recent.written()), "r000")
    assert "Its first token, 1.00 s after it came" in reported(story)


def test_the_oldest_lines_make_room_but_not_the_first() -> None:
    recent = RecentLines(max_bytes=400)
    prefill_two(EventReporter(DecisionLog(None, clock_start=5.0, listeners=[recent]), INSTANCES))
    first, *rest = recent.written()
    assert b'"started"' in first
    assert 0 < sum(map(len, rest)) <= 400
    index = index_of(recent.written())
    assert index.clock_start == 5.0
    assert not index.arrivals


def test_every_choice_of_a_request_arrives() -> None:
    runs = RequestRuns()
    reporter = EventReporter(DecisionLog(None, listeners=[runs]), INSTANCES)
    reporter.report(RequestArrived(0.0, replace(timed_request(0, 6, 9), num_choices=3)))
    assert len({run.request_id for run in runs.live}) == len(runs.live) == 3


def test_a_choice_starts_with_the_prompt_that_it_waits_for(tmp_path: Path) -> None:
    over: list[RequestRun] = []
    runs = RequestRuns([over.append])
    request = replace(timed_request(0, 6, 4), num_choices=2)
    for line in logged(tmp_path / "log", in_group(0), INSTANCES, [request]):
        runs(line, b"")
    assert [run.started_at for run in over] == [0.0, 0.0]
    assert over[0].first_token_at == over[1].first_token_at


def test_a_batch_that_is_void_before_it_starts_is_forgotten_whatever_part_the_lost_instance_had() -> None:
    runs = RequestRuns()
    runs(ArrivedLine(0.0, "r", 1, 9, ()), b"")
    held = LoggedBatch(1, (0,), 1, decodes=(Decode("r", 1, 0),), holder_ids=(2,))
    behind = LoggedBatch(2, (1,), 1, decodes=(Decode("r", 2, 1),))
    runs(PlannedLine(0.0, (), (), (held, behind)), b"")
    runs(InstanceLostLine(0.5, 2, void_batch_ids=(1, 2)), b"")
    for batch_id in (1, 2):
        runs(BatchStartedLine(1.0, batch_id), b"")
    (run,) = runs.live
    assert (run.started_at, run.dops) == (None, [])
