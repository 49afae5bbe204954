"""One trace of all workers, joined from the trace of each."""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from time import strftime
from typing import Any, TypeVar

import msgspec

from loong.core.errors import ClusterError, InvalidRequestError
from loong.executor.endpoints import WorkerId
from loong.executor.workers import WorkersExecutor
from loong.private_files import make_private_folder, write_private

T = TypeVar("T")

_PIDS_APART = 1 << 24  # above the ids of processes and devices, so that workers' ids differ
_US = 1000  # nanoseconds


class WorkerTraces:
    """Writes traces of an executor's workers into a folder, one trace after the other.

    A started operation is finished even if its client leaves, because workers write into a folder that must
    exist until then.
    """

    def __init__(self, executor: WorkersExecutor, folder: Path) -> None:
        self._executor, self._folder = executor, folder
        self._numbers = count(1)
        self._is_started = False
        self._one_at_a_time = asyncio.Lock()
        self._in_flight: set[asyncio.Task[Any]] = set()  # Any: nothing, or a path

    async def start(self) -> None:
        """Return once all workers trace.

        Raises `InvalidRequestError` if a trace is running, and `ClusterError` if a worker cannot start one.
        """
        await self._finished(self._start())

    async def write(self) -> Path:
        """End the trace after the steps in flight, and return the path of the file for all workers.

        Raises `InvalidRequestError` if no trace was started, and `ClusterError` if it cannot be written.
        """
        return await self._finished(self._write())

    async def _finished(self, work: Coroutine[None, None, T]) -> T:
        task = asyncio.create_task(work)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        return await asyncio.shield(task)

    async def _start(self) -> None:
        async with self._one_at_a_time:
            if self._is_started:
                raise InvalidRequestError("a trace is running; POST /stop_profile ends it")
            await self._executor.calls.start_traces()
            self._is_started = True

    async def _write(self) -> Path:
        async with self._one_at_a_time:
            if not self._is_started:
                raise InvalidRequestError("no trace is running; POST /start_profile starts one")
            self._is_started = False
            try:
                return await self._written()
            except OSError as error:
                raise ClusterError(f"the trace could not be written: {error}") from error

    async def _written(self) -> Path:
        make_private_folder(self._folder)
        target = self._folder / f"{strftime('trace-%Y%m%d-%H%M%S')}-{next(self._numbers)}.json"
        with TemporaryDirectory(dir=self._folder) as folder:
            files = await self._executor.calls.write_traces(Path(folder))
            try:
                await asyncio.to_thread(join_traces, files, target)
            except OSError:
                target.unlink(missing_ok=True)  # a part of it, on a full disk
                raise
        return target


def join_traces(files: Mapping[WorkerId, Path], target: Path) -> None:
    """Write the events of all files to one Chrome trace, with each worker's processes named after it.

    Raises `ClusterError` if a file is not whole: torch reports no full disk.
    """
    traces = {worker_id: _read(worker_id, path) for worker_id, path in files.items()}
    bases = {worker_id: trace.get("baseTimeNanoseconds", 0) for worker_id, trace in traces.items()}
    first_base = min(bases.values())
    events: list[dict[str, Any]] = []  # Any: what torch writes
    for number, (worker_id, trace) in enumerate(traces.items()):
        shift = (bases[worker_id] - first_base) / _US
        events += _moved(trace["traceEvents"], _name(worker_id), number * _PIDS_APART, shift)
    write_private(target, msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))


def _read(worker_id: WorkerId, path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        where = path.parent.parent
        raise ClusterError(
            f"{_name(worker_id)} wrote a part of its trace; {where} may be full: {error}"
        ) from None


def _name(worker_id: WorkerId) -> str:
    instance_id, tp_rank = worker_id
    return f"instance {instance_id}" + (f" rank {tp_rank}" if tp_rank else "")


def _moved(events: list[dict[str, Any]], name: str, first_pid: int, shift: float) -> Iterator[dict[str, Any]]:
    """Yield the events of one worker, shifted by `shift` microseconds, with process ids of their own."""
    for event in events:
        if isinstance(event.get("pid"), int):
            event["pid"] += first_pid
        if "ts" in event:
            event["ts"] += shift
        if event.get("name") == "process_name":
            event["args"] = {"name": f"{name}: {event['args']['name']}"}
        yield event
