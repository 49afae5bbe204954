import json
from pathlib import Path

from loong.executor.traces import join_traces


def test_one_timeline_has_the_events_of_all_workers_apart_and_at_one_clock(tmp_path: Path) -> None:
    traces = {
        (0, 0): {
            "baseTimeNanoseconds": 1_000_000,
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
                {"ph": "X", "name": "step", "pid": 7, "tid": 1, "ts": 10.0, "dur": 2.0},
            ],
        },
        (1, 1): {
            "baseTimeNanoseconds": 3_000_000,
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}},
                {"ph": "X", "name": "step", "pid": 7, "tid": 1, "ts": 10.0, "dur": 2.0},
                {"ph": "X", "name": "note", "pid": "Spans", "ts": 11.0, "dur": 0.0},
            ],
        },
    }
    files = {worker_id: tmp_path / f"{worker_id}.json" for worker_id in traces}
    for worker_id, trace in traces.items():
        files[worker_id].write_text(json.dumps(trace))
    join_traces(files, tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert sorted(names.values()) == ["instance 0: python", "instance 1 rank 1: python"]
    steps = {names[event["pid"]]: event["ts"] for event in events if event["name"] == "step"}
    assert steps == {"instance 0: python": 10.0, "instance 1 rank 1: python": 2010.0}
    assert [event["ts"] for event in events if event["name"] == "note"] == [2011.0]
