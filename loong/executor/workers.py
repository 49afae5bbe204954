"""Carries instructions out on real workers."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TypeAlias, assert_never

import zmq

from loong.core.errors import ClusterError, InvalidEventError
from loong.core.events import (
    BatchFinished,
    Drained,
    Event,
    InstanceLost,
    MigrationFinished,
    TokensProduced,
)
from loong.core.instance import home_instance_id
from loong.core.instructions import ExtendLease, Instruction, MoveKV, ReleaseKV, RunBatch, StopLease
from loong.core.placement import InstanceId
from loong.executor.grammars import Grammars
from loong.stream import Stream
from loong.wire import (
    BatchDone,
    GrammarDone,
    Heartbeat,
    MigrationDone,
    PrepareGrammar,
    Report,
    Shutdown,
    StartTrace,
    StepDone,
    TraceWritten,
    WorkerFailed,
    WorkerReady,
    WriteTrace,
    decode_report,
    encode,
)

logger = logging.getLogger(__name__)

MAX_SILENCE_SECONDS = 20.0  # of heartbeats that are a second apart
MAX_TURN_SECONDS = 0.005  # of whoever takes events, after which others have their turn

WorkerId: TypeAlias = tuple[InstanceId, int]  # instance and tp rank


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where workers take commands, and where they report; `home` is the instance that keeps a pool."""

    reports: str
    commands: Mapping[WorkerId, str]
    num_instances: int

    def workers_of(self, instance_id: InstanceId) -> tuple[WorkerId, ...]:
        """The ranks of an instance, or of the instance that keeps a host tier."""
        home_id = home_instance_id(instance_id, self.num_instances)
        return tuple(worker_id for worker_id in self.commands if worker_id[0] == home_id)


class WorkersExecutor:
    """An `Executor` whose events are what the workers report, and what `post` adds."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports = self._context.socket(zmq.PULL)
        self._reports.setsockopt(zmq.RCVHWM, 0)
        self._reports.bind(endpoints.reports)
        self._commands = {worker_id: self._connect(where) for worker_id, where in endpoints.commands.items()}
        self._events = Stream[Event | Drained | BaseException]()
        self._ending: Drained | BaseException | None = None  # what came after the last event
        self._turn_began_at = monotonic()
        self._waiting_for: defaultdict[tuple[str, int], set[WorkerId]] = defaultdict(set)
        self._first_done: dict[int, BatchDone] = {}  # by batch; the others must agree
        self._rolled_back: set[int] = set()
        self._not_ready = set(endpoints.commands)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tracing: set[WorkerId] = set()  # those that are to write a trace, until `_traced`
        self._traced: asyncio.Future[None] | None = None
        self._grammars = Grammars(endpoints.commands)
        self._last_heard = dict.fromkeys(endpoints.commands, monotonic())
        self._started_at = monotonic()

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(endpoint)
        return socket

    @property
    def now(self) -> float:
        """Seconds since the start, the clock of all events."""
        return monotonic() - self._started_at

    @property
    def seconds_since_heard(self) -> float:
        """How long the quietest worker has been silent."""
        return monotonic() - min(self._last_heard.values())

    async def wait_until_ready(self, timeout: float) -> None:
        """Wait for every worker's weights and pools.

        Raises `ClusterError` if one is lost before, or not ready within `timeout` seconds.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._ready
        except TimeoutError:
            late = sorted({instance_id for instance_id, _ in self._not_ready})
            raise ClusterError(f"instances {late} were not ready within {timeout:g} s") from None

    def post(self, event: Event | Drained) -> None:
        """Put an event of this process into the stream."""
        self._events.put(event)

    def lose(self, instance_id: InstanceId, reason: str) -> None:
        """Tell that a worker of an instance is gone; of several reasons the first counts."""
        if not self._ready.done():
            self._ready.set_exception(ClusterError(f"instance {instance_id} did not start: {reason}"))
        self.post(InstanceLost(self.now, instance_id, reason))

    def fail(self, error: BaseException) -> None:
        """Let whoever waits for events have this error after those there are."""
        self._events.put(error)

    async def next_events(self) -> Sequence[Event]:
        """All events there are, in the order in which they became known.

        Raises what `fail` was given, and `InvalidEventError` if workers contradict.
        """
        events: list[Event] = []
        if self._ending is None:
            await self._let_others_run()
            self._drain()
            for item in await self._events.get_all():
                if isinstance(item, Drained | BaseException):
                    self._ending = item
                    break
                events.append(item)
        if isinstance(self._ending, BaseException) and not events:
            raise self._ending
        return events

    async def _let_others_run(self) -> None:
        """Suspend if that was long ago: to take events that are there already does not."""
        if monotonic() - self._turn_began_at > MAX_TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn_began_at = monotonic()

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Send each instruction to the workers that have a part in it."""
        for instruction in instructions:
            workers = self._addressees(instruction)
            match instruction:
                case RunBatch():
                    self._waiting_for["batch", instruction.batch_id] = set(workers)
                case MoveKV():
                    self._waiting_for["migration", instruction.migration_id] = set(workers)
                case ExtendLease() | StopLease() | ReleaseKV():
                    pass
                case _:
                    assert_never(instruction)
            self._send(workers, encode(instruction))

    async def read_reports(self) -> None:
        """Turn reports into events until cancelled. Raises `InvalidEventError` if workers contradict."""
        readable, loop = asyncio.Event(), asyncio.get_running_loop()
        descriptor = self._reports.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            while True:
                readable.clear()
                self._drain()  # to the last: the descriptor tells of new frames only when none are left
                await readable.wait()
        finally:
            loop.remove_reader(descriptor)

    def _drain(self) -> None:
        with suppress(zmq.Again):
            while True:
                self.receive(self._reports.recv(zmq.NOBLOCK))

    def receive(self, frame: bytes) -> None:
        """Turn one worker's report into events. Raises `InvalidEventError` if it contradicts another's."""
        self._translate(decode_report(frame))

    async def watch_silence(self) -> None:
        """Once all are ready, give up a worker that has been silent for too long; until cancelled."""
        await self._ready
        self._last_heard = dict.fromkeys(self._last_heard, monotonic())
        while True:
            await asyncio.sleep(MAX_SILENCE_SECONDS / 10)
            (instance_id, _), heard_at = min(self._last_heard.items(), key=lambda item: item[1])
            if monotonic() - heard_at > MAX_SILENCE_SECONDS:
                self.lose(instance_id, f"it was silent for {MAX_SILENCE_SECONDS:g} s")
                return

    def prepare_grammar(self, json_schema: str) -> asyncio.Future[None]:
        """Let all workers compile a schema, before a request that needs it is planned.

        What it returns is done when all have, and raises `ClusterError` if one cannot.
        """
        number, done = self._grammars.begin()
        self._send(self._endpoints.commands, encode(PrepareGrammar(number, json_schema)))
        return done

    def start_trace(self) -> None:
        """Let all workers trace what they do from now on."""
        self._send(self._endpoints.commands, encode(StartTrace()))

    async def write_traces(self, folder: Path) -> Mapping[WorkerId, Path]:
        """Let all workers end their traces after what was submitted, and wait for the file of each."""
        files = {(i, rank): folder / f"worker-{i}-{rank}.json" for i, rank in self._endpoints.commands}
        self._tracing, self._traced = set(files), asyncio.get_running_loop().create_future()
        for worker_id, path in files.items():
            self._send([worker_id], encode(WriteTrace(str(path))))
        await self._traced
        return files

    def shut_down(self) -> None:
        """Tell all workers to end."""
        self._send(self._endpoints.commands, encode(Shutdown()))

    def close(self) -> None:
        """Close all sockets; what is queued has a second to leave."""
        for socket in self._commands.values():
            socket.close()
        self._reports.close(linger=0)
        self._context.destroy(linger=1000)

    def _addressees(self, instruction: Instruction) -> tuple[WorkerId, ...]:
        match instruction:
            case RunBatch():
                instance_ids = instruction.plan.group.instance_ids
            case ExtendLease():
                instance_ids = instruction.group.instance_ids
            case StopLease():
                return ((instruction.group.leader_id, 0),)
            case MoveKV():
                migration = instruction.migration
                instance_ids = (migration.segment.instance_id, migration.destination_id)
            case ReleaseKV():
                instance_ids = instruction.instance_ids
            case _:
                assert_never(instruction)
        workers = (worker for i in instance_ids for worker in self._endpoints.workers_of(i))
        return tuple(dict.fromkeys(workers))

    def _send(self, workers: Iterable[WorkerId], frame: bytes) -> None:
        for worker_id in workers:
            self._commands[worker_id].send(frame)

    def _translate(self, report: Report) -> None:
        match report:
            case WorkerReady():
                self._not_ready.discard((report.instance_id, report.tp_rank))
                if not self._not_ready and not self._ready.done():
                    self._ready.set_result(None)
            case Heartbeat():
                self._last_heard[report.instance_id, report.tp_rank] = monotonic()
            case StepDone():
                self.post(TokensProduced(self.now, report.batch_id, report.step, report.tokens))
            case BatchDone():
                self._end_batch(report)
            case MigrationDone():
                self._end_migration(report)
            case GrammarDone():
                self._grammars.take(report)
            case TraceWritten():
                self._tracing.discard((report.instance_id, report.tp_rank))
                if self._traced is not None and not self._tracing and not self._traced.done():
                    self._traced.set_result(None)
            case WorkerFailed():
                self.lose(report.instance_id, report.message)
            case _:
                assert_never(report)

    def _end_batch(self, report: BatchDone) -> None:
        batch_id = report.batch_id
        first = self._first_done.setdefault(batch_id, report)
        if report.num_steps != first.num_steps:
            raise InvalidEventError(
                f"batch {batch_id} took {first.num_steps} steps on rank {first.tp_rank} of instance "
                f"{first.instance_id}, but {report.num_steps} on rank {report.tp_rank} of instance "
                f"{report.instance_id}"
            )
        if self._is_last("batch", batch_id, (report.instance_id, report.tp_rank)):
            del self._first_done[batch_id]
            self.post(BatchFinished(self.now, batch_id, report.num_steps))

    def _end_migration(self, report: MigrationDone) -> None:
        migration_id = report.migration_id
        if not report.is_committed:
            self._rolled_back.add(migration_id)
        if self._is_last("migration", migration_id, (report.instance_id, report.tp_rank)):
            is_committed = migration_id not in self._rolled_back
            if not is_committed:
                logger.warning("migration %d was rolled back", migration_id)
            self._rolled_back.discard(migration_id)
            self.post(MigrationFinished(self.now, migration_id, is_committed))

    def _is_last(self, kind: str, number: int, worker_id: WorkerId) -> bool:
        """Whether this was the last worker that a batch or migration waits for."""
        waiting_for = self._waiting_for[kind, number]
        waiting_for.discard(worker_id)
        if waiting_for:
            return False
        del self._waiting_for[kind, number]
        return True
