import json

import msgspec
import pytest

from loong.core.cluster_history import (
    BatchSlice,
    ChangeKind,
    ClusterHistory,
    InstanceChange,
    KVLevel,
    KVMove,
    RequestSpan,
)
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.core.request import FinishReason
from loong.server.metrics.trace import chrome_trace
from loong.workloads.report.timeline import parse_trace

PREFILL = BatchSlice(
    1, ESPGroup((1, 0)), Phase.PREFILL, 1.0, 2.0, ("a", "b"), ((1, 5), (0, 7)), ((1, 6), (0, 8)), 40, 30
)
DECODE = BatchSlice(2, ESPGroup((0,)), Phase.DECODE, 2.0, 2.5, ("a",), ((0, 9),), num_recomputed_tokens=3)
REQUESTS = (
    RequestSpan("a", 30, 0.5, 1.5, 2.5, FinishReason.STOP),
    RequestSpan("b", 10, 0.75, 2.0),
    RequestSpan("c", 9, 2.25),
)
CHANGES = (
    InstanceChange(2, ChangeKind.LOST, 1.25, "it was killed"),
    InstanceChange(2, ChangeKind.JOINED, 2.5),
)
MOVE = KVMove(4, "b", 1, 0, 5, 2.25, 2.75, is_committed=True, is_copy=True)


def test_a_history_comes_back_from_its_trace() -> None:
    levels = KVLevel(1, 2.5, 0), KVLevel(0, 3.0, 0)
    history = ClusterHistory((PREFILL, DECODE), (MOVE,), {0: 100, 1: 100}, REQUESTS, CHANGES, levels)
    assert parse_trace(chrome_trace(history)) == history


def test_events_of_other_programs_are_left_out() -> None:
    other = {"ph": "X", "cat": "cpu", "name": "plan", "ts": 1, "dur": 1, "tid": "x", "args": {"group": [1]}}
    gauge = {"ph": "C", "name": "queue", "ts": 1, "pid": 1, "args": {"waiting": 3}}
    trace = json.dumps({"traceEvents": [other, gauge]}).encode()
    assert parse_trace(trace) == ClusterHistory()


@pytest.mark.parametrize(
    "page",
    [
        b"<html>",
        b"[]",
        b'{"traceEvents": [{"name": "no phase"}]}',
        b'{"traceEvents": [{"ph": "X", "cat": "batch", "args": {"batch_id": 1, "group": [], "phase": "x"}}]}',
    ],
)
def test_what_is_not_a_trace_is_refused(page: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        parse_trace(page)
