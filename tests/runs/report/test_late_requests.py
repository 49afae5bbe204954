"""The choice of the requests that were late most, and their captions."""

from pathlib import Path

from decision_logs import EventReporter, prefill_two
from run_documents import run_row, write_run

from loong.core.cluster_history import BatchSlice, ClusterHistory, RequestSpan
from loong.core.cost.work import Phase
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.request import FinishReason
from loong.observability.decision_log.log import DecisionLog
from loong.observability.decision_log.recent import RecentLines, index_of
from loong.runs.report.late_requests import NO_WAIT, UNKNOWN_REASON, late_requests, stories_of

SPANS = tuple(RequestSpan(f"r{i}", 9, 0.0, float(i), 20.0, FinishReason.STOP) for i in range(1, 15))


def test_without_a_run_the_slowest_to_a_token_come_first() -> None:
    never = RequestSpan("never", 9, 0.0)
    found = late_requests(ClusterHistory((), (), {}, (*SPANS, never)))
    assert [late.span.request_id for late in found] == ["never", *(f"r{i}" for i in range(14, 5, -1))]


def test_those_that_exceed_their_slo_most_are_chosen_and_failed_ones_come_first(tmp_path: Path) -> None:
    row = run_row(
        "esp",
        request_ids=["r1", "r2", "r3", ""],
        slo_ratios=[0.5, None, 1.5, 9.0],
        ttft_targets=[1.0, 2.0, 3.0, 4.0],
    )
    (run,) = write_run(tmp_path, [row]).runs
    batch = BatchSlice(1, ESPGroup((0,)), Phase.PREFILL, 0.5, 1.0, ("r3",), (), longest_prompt=9)
    found = late_requests(ClusterHistory((batch,), (), {}, SPANS), run)
    assert [(late.span.request_id, late.verdict, late.target) for late in found] == [
        ("r2", "failed", 2.0),
        ("r3", "1.5 x its SLO", 3.0),
        ("r1", "0.5 x its SLO", 1.0),
    ]
    assert [late.batches for late in found] == [(), [batch], ()]


def test_words_and_stories_are_those_of_explain() -> None:
    recent = RecentLines()
    instances = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 100) for i in range(3))
    prefill_two(EventReporter(DecisionLog(None, listeners=[recent]), instances))
    index = index_of(recent.written())
    spans = tuple(RequestSpan(request_id, 6, 0.0, 1.0) for request_id in ("r000", "unknown"))
    known, unknown = late_requests(ClusterHistory((), (), {}, spans), index=index)
    assert known.words == (NO_WAIT,) or known.words[0].startswith("Having waited")
    assert unknown.words == (UNKNOWN_REASON,)
    (story,) = stories_of(index, ["r000", "unknown"])
    assert story.heading[0].startswith("Request r000: a prompt of 6 tokens")
    assert story.chapters[0][1][0].startswith("It comes")
