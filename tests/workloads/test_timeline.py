import json
from typing import Any

import msgspec
import pytest

from loong.workloads.timeline import KVSample, Timeline, TimelineSlice, parse_timeline


def batch(ts: int, dur: int, instance_id: int, group: list[int], phase: str) -> dict[str, Any]:
    args = {"batch_id": 1, "group": group, "dop": len(group), "phase": phase, "request_ids": ["a"]}
    return {"ph": "X", "name": phase, "ts": ts, "dur": dur, "pid": 1, "tid": instance_id, "args": args}


def trace(*events: dict[str, Any]) -> bytes:
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()


def piece(start: float, end: float, instance_id: int = 0, phase: str = "decode") -> TimelineSlice:
    return TimelineSlice(instance_id, start, end, (0, 1), phase)


def test_batches_and_kv_are_read_in_seconds_and_by_time() -> None:
    timeline = parse_timeline(
        trace(
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "instance 0"}},
            batch(2_000_000, 500_000, 1, [0, 1], "decode"),
            batch(1_000_000, 250_000, 0, [0], "prefill"),
            {
                "ph": "C",
                "name": "KV tokens",
                "pid": 1,
                "ts": 1_500_000,
                "args": {"instance 1": 7, "instance 0": 5},
            },
        )
    )
    assert timeline.slices == (
        TimelineSlice(0, 1.0, 1.25, (0,), "prefill"),
        TimelineSlice(1, 2.0, 2.5, (0, 1), "decode"),
    )
    assert timeline.kv_samples == (KVSample(0, 1.5, 5), KVSample(1, 1.5, 7))
    assert timeline.instance_ids == [0, 1]
    assert timeline.end == 2.5
    assert timeline.slices[1].dop == 2


def test_events_of_other_kinds_are_left_out() -> None:
    flow = {"ph": "s", "name": "migrate", "ts": 1, "pid": 1, "tid": "x", "id": 4, "cat": "kv"}
    other = {"ph": "X", "name": "plan", "ts": 1, "dur": 1, "pid": 0, "tid": 0, "args": {"note": [1]}}
    gauge = {"ph": "C", "name": "queue", "ts": 1, "pid": 1, "args": {"waiting": 3}}
    assert parse_timeline(trace(flow, other, gauge)) == Timeline((), ())


def test_a_run_begins_at_its_first_batch_after_the_warm_up() -> None:
    timeline = Timeline(
        (piece(0.0, 1.0), piece(5.0, 6.0), piece(7.0, 9.0)),
        (KVSample(0, 0.5, 1), KVSample(0, 5.5, 2)),
    )
    assert timeline.after(1.0) == Timeline(
        (piece(0.0, 1.0), piece(2.0, 4.0)),
        (KVSample(0, 0.5, 2),),
    )


def test_neighbors_alike_are_joined_and_others_are_not() -> None:
    timeline = Timeline(
        (
            piece(0.0, 1.0),
            piece(0.0, 1.0, instance_id=1),
            piece(1.01, 2.0),
            piece(2.0, 3.0, phase="prefill"),
            piece(3.0, 4.0),
            piece(5.0, 6.0),
        ),
        (),
    )
    assert timeline.merged(gap=0.1).slices == (
        piece(0.0, 2.0),
        piece(0.0, 1.0, instance_id=1),
        piece(2.0, 3.0, phase="prefill"),
        piece(3.0, 4.0),
        piece(5.0, 6.0),
    )


@pytest.mark.parametrize("page", [b"<html>", b"[]", b'{"traceEvents": [{"name": "no phase"}]}'])
def test_what_is_not_a_trace_is_refused(page: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        parse_timeline(page)
