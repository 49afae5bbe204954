import asyncio
import json
from pathlib import Path

import pytest
import zmq
from raw_http import until
from reporting_workers import WORKERS, executor_and_reports

from loong.core.errors import InvalidRequestError
from loong.executor.traces import WorkerTraces, join_traces
from loong.wire import TraceWritten, encode


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


def folders_in(folder: Path) -> set[Path]:
    """Where workers are to write."""
    return {path for path in folder.iterdir() if path.is_dir()}


def write_all(folder: Path, reports: "zmq.Socket[bytes]") -> None:
    """Do what all workers would."""
    for instance_id, tp_rank in WORKERS:
        (folder / f"worker-{instance_id}-{tp_rank}.json").write_text('{"traceEvents": []}')
        reports.send(encode(TraceWritten(instance_id, tp_rank)))


async def test_a_trace_is_written_once_for_each_start_whoever_waits_for_it(tmp_path: Path) -> None:
    with executor_and_reports() as (executor, reports):
        reading = asyncio.create_task(executor.read_reports())
        traces = WorkerTraces(executor, tmp_path)
        with pytest.raises(InvalidRequestError, match="POST /start_profile"):
            await traces.write()
        traces.start()
        leaving = asyncio.create_task(traces.write())
        await until(lambda: bool(folders_in(tmp_path)))
        leaving.cancel()
        with pytest.raises(InvalidRequestError, match="ended"):
            await traces.write()
        traces.start()
        staying = asyncio.create_task(traces.write())
        (first,) = folders_in(tmp_path)
        write_all(first, reports)
        await until(lambda: bool(folders_in(tmp_path) - {first}))
        (second,) = folders_in(tmp_path)
        write_all(second, reports)
        written = await staying
        assert leaving.cancelled()
        assert written.name.endswith("-2.json")
        assert not folders_in(tmp_path)
        reading.cancel()
        await asyncio.wait([reading])
