import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest
import zmq
from raw_http import until
from reporting_workers import WORKERS, executor_and_reports

from loong.core.errors import ClusterError, InvalidRequestError
from loong.messages.wire import Command, CommandDone, EndTrace, StartTrace, decode_command, encode
from loong.observability.worker_traces import WorkerTraces, join_traces


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


@pytest.mark.parametrize("written", ["", '{"traceEvents": [{"ph": "X"', "[]"])
def test_a_part_of_a_trace_is_an_error_that_names_its_worker(tmp_path: Path, written: str) -> None:
    """The disk was full when torch wrote it."""
    (tmp_path / "part").write_text(written)
    with pytest.raises(ClusterError, match=r"instance 1 rank 1 wrote a part of its trace; .* may be full"):
        join_traces({(1, 1): tmp_path / "part"}, tmp_path / "all.json")
    assert not (tmp_path / "all.json").exists()


Commands: TypeAlias = "zmq.Socket[bytes]"  # of a worker


@contextmanager
def tracing_workers(folder: Path) -> Iterator[tuple[WorkerTraces, list[Commands], "zmq.Socket[bytes]"]]:
    """Traces of workers whose commands a test reads, and the socket for all their reports."""
    with executor_and_reports() as (executor, reports), zmq.Context() as context, ExitStack() as stack:
        endpoints = [f"ipc://{directory_of(reports)}/{i}-{rank}" for i, rank in WORKERS]
        commands = [stack.enter_context(context.socket(zmq.PULL)) for _ in WORKERS]
        for socket, endpoint in zip(commands, endpoints, strict=True):
            socket.bind(endpoint)
        reading = asyncio.create_task(executor.read_reports())
        yield WorkerTraces(executor, folder), commands, reports
        reading.cancel()


def directory_of(reports: "zmq.Socket[bytes]") -> str:
    endpoint = reports.getsockopt_string(zmq.LAST_ENDPOINT)
    return endpoint.removeprefix("ipc://").rpartition("/")[0]


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def next_command(commands: Sequence[Commands]) -> list[Command]:
    """Return the next command of each worker."""
    received = []
    for socket in commands:
        await until(lambda socket=socket: bool(socket.poll(0)))  # type: ignore[misc]
        received.append(decode_command(socket.recv()))
    return received


def carry_out(commands: Sequence[Command], reports: "zmq.Socket[bytes]", failure: str = "") -> None:
    """Do what all workers would, but for the last if it fails."""
    for worker_id, command in zip(WORKERS, commands, strict=True):
        assert isinstance(command, StartTrace | EndTrace)
        if isinstance(command, EndTrace) and command.path is not None:
            Path(command.path).write_text('{"traceEvents": []}')
        is_last = worker_id == WORKERS[-1]
        reports.send(encode(CommandDone(command.number, *worker_id, failure if is_last else "")))


async def test_a_trace_has_begun_when_all_workers_have(tmp_path: Path) -> None:
    with tracing_workers(tmp_path) as (traces, commands, reports):
        starting = asyncio.create_task(traces.start())
        started = await next_command(commands)
        first, *others = WORKERS
        for number, worker_id in enumerate((*others, first)):
            assert not starting.done(), f"{number} have begun"
            assert isinstance(started[0], StartTrace)
            reports.send(encode(CommandDone(started[0].number, *worker_id)))
        await starting
        with pytest.raises(InvalidRequestError, match="POST /stop_profile"):
            await traces.start()


async def test_workers_that_cannot_all_begin_trace_nothing_and_may_begin_later(tmp_path: Path) -> None:
    with tracing_workers(tmp_path) as (traces, commands, reports):
        starting = asyncio.create_task(traces.start())
        carry_out(await next_command(commands), reports, failure="no room")
        with pytest.raises(ClusterError, match=r"^instance 1 could not begin a trace: no room$"):
            await starting
        dropped = await next_command(commands)
        assert [isinstance(command, EndTrace) and command.path for command in dropped] == [None] * 4
        with pytest.raises(InvalidRequestError, match="POST /start_profile"):
            await traces.write()
        starting = asyncio.create_task(traces.start())
        carry_out(await next_command(commands), reports)
        await starting


async def test_a_trace_that_a_worker_cannot_write_is_an_error_and_another_may_begin(tmp_path: Path) -> None:
    with tracing_workers(tmp_path) as (traces, commands, reports):
        for failure in ("the disk is full", ""):
            starting = asyncio.create_task(traces.start())
            carry_out(await next_command(commands), reports)
            await starting
            writing = asyncio.create_task(traces.write())
            carry_out(await next_command(commands), reports, failure)
            if failure:
                with pytest.raises(ClusterError, match=r"^instance 1 could not write its trace: the disk"):
                    await writing
        written = await writing
        assert names_in(tmp_path) == [written.name]


async def test_a_trace_is_written_once_for_each_start_even_if_its_client_leaves(tmp_path: Path) -> None:
    with tracing_workers(tmp_path) as (traces, commands, reports):
        with pytest.raises(InvalidRequestError, match="POST /start_profile"):
            await traces.write()
        leaving = asyncio.create_task(traces.start())
        started = await next_command(commands)
        leaving.cancel()
        carry_out(started, reports)
        leaving_too = asyncio.create_task(traces.write())  # which waits until all have begun
        ended = await next_command(commands)
        leaving_too.cancel()
        late = asyncio.create_task(traces.write())
        carry_out(ended, reports)
        with pytest.raises(InvalidRequestError, match="no trace is running"):
            await late
        assert leaving.cancelled()
        assert leaving_too.cancelled()
        (written,) = names_in(tmp_path)
        assert written.endswith("-1.json")
