"""Waiting requests: the picture's strip holds exactly the seconds in which no batch had a request."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loong.core.cluster_history import BatchSlice, ClusterHistory, KVMove, RequestSpan
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.core.request import FinishReason
from loong.workloads.report.timeline_cells import Scale
from loong.workloads.report.waiting import waiting_by_column, waits_of

TIMES = st.integers(0, 40).map(float)


def batch(start: float, end: float, *request_ids: str) -> BatchSlice:
    return BatchSlice(1, ESPGroup((0,)), Phase.DECODE, start, end, request_ids, ())


def waits(history: ClusterHistory) -> list[tuple[float, float]]:
    return [(wait.start, wait.end) for wait in waits_of(history)]


SPAN = RequestSpan("a", 9, 1.0, 4.0, 9.0, FinishReason.STOP)


def test_a_request_waits_before_and_between_its_batches() -> None:
    history = ClusterHistory((batch(3.0, 4.0, "a"), batch(6.0, 9.0, "b", "a")), requests=(SPAN,))
    assert waits(history) == [(1.0, 3.0), (4.0, 6.0)]


def test_a_request_does_not_wait_while_its_kv_moves() -> None:
    move = KVMove(1, "a", 0, 1, 9, 4.0, 6.0, is_committed=True)
    history = ClusterHistory((batch(1.0, 4.0, "a"), batch(6.0, 9.0, "a")), (move,), {}, (SPAN,))
    assert waits(history) == []


def test_a_request_without_any_batch_waits_to_its_end_or_that_of_the_run() -> None:
    never, open_one = (
        replace(SPAN, first_token_at=None, ended_at=ended, end=end)
        for ended, end in ((5.0, FinishReason.ABORT), (None, None))
    )
    assert waits(ClusterHistory((batch(0.0, 8.0, "b"),), requests=(never,))) == [(1.0, 5.0)]
    assert waits(ClusterHistory((batch(0.0, 8.0, "b"),), requests=(open_one,))) == [(1.0, 8.0)]


def test_nothing_is_said_of_a_request_whose_batches_are_not_known_any_more() -> None:
    assert waits(ClusterHistory((batch(0.0, 8.0, "b"),), requests=(SPAN,))) == []


@given(
    arrived=TIMES,
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=6),
    window=st.tuples(st.integers(0, 30), st.integers(1, 40)),
)
def test_the_strip_holds_the_seconds_waited_in_its_window(
    arrived: float, lengths: list[tuple[int, int]], window: tuple[int, int]
) -> None:
    time, waited, batches = arrived, [], []
    for pause, length in lengths:
        waited.append((time, time + pause))
        batches.append(batch(time + pause, time + pause + length, "a"))
        time += pause + length
    history = ClusterHistory(
        tuple(batches), requests=(RequestSpan("a", 9, arrived, time, time, FinishReason.STOP),)
    )
    scale = Scale(float(window[0]), float(sum(window)), 0, 0.0)
    shown = sum(max(0.0, min(end, scale.end) - max(start, scale.start)) for start, end in waited)
    assert sum(waiting_by_column(waits_of(history), scale)) * scale.column == pytest.approx(shown, abs=1e-6)
