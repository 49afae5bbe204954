"""Carries instructions out on real workers."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import assert_never

import zmq

from loong.core.errors import ClusterError
from loong.core.events import (
    BatchFinished,
    BatchStarted,
    Drained,
    EndForeseen,
    Event,
    InstanceLost,
    MigrationFinished,
    TokensProduced,
)
from loong.core.foresight import Lead
from loong.core.instructions import ExtendLease, Instruction, MoveKV, ReleaseKV, RunBatch, StopLease
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.executor.endpoints import Endpoints, WorkerId
from loong.executor.grammars import Grammars
from loong.executor.holding import Holding
from loong.executor.in_order import InOrder
from loong.executor.outstanding import Outstanding
from loong.stream import Stream
from loong.wire import (
    BatchBegun,
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

MAX_SILENCE_SECONDS = 20.0  # of heartbeats that are a second apart
MAX_TURN_SECONDS = 0.005  # of whoever takes events, after which others have their turn


class WorkersExecutor:
    """An `Executor` whose events are what the workers report, and what `post` adds.

    Ends are foreseen by `lead` before they come; without it, none is.
    """

    def __init__(self, endpoints: Endpoints, lead: Lead | None = None) -> None:
        self._endpoints, self._lead = endpoints, lead
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports = self._context.socket(zmq.PULL)
        self._reports.setsockopt(zmq.RCVHWM, 0)
        self._reports.bind(endpoints.reports)
        self._commands = {worker_id: self._connect(where) for worker_id, where in endpoints.commands.items()}
        self._events = Stream[Event | Drained | BaseException]()
        self._ending: Drained | BaseException | None = None  # what came after the last event
        self._turn_began_at = monotonic()
        self._outstanding = Outstanding()
        self._holding = Holding()
        self._in_order = InOrder()
        self._to_foresee: dict[int, BatchPlan] = {}  # batches in flight
        self._alarms: dict[int, asyncio.TimerHandle] = {}
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
                if isinstance(item, BatchFinished):
                    self._holding.forget(item.batch_id)
                events.append(item)
        if isinstance(self._ending, BaseException) and not events:
            raise self._ending
        return joined(events)

    async def _let_others_run(self) -> None:
        """Suspend if that was long ago: to take events that are there already does not."""
        if monotonic() - self._turn_began_at > MAX_TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn_began_at = monotonic()

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Send each instruction to the workers that have a part in it, once they can."""
        for instruction in instructions:
            if (told := self._holding.take(instruction)) is not None:
                self._tell(told)

    def _tell(self, instruction: Instruction) -> None:
        workers = self._endpoints.addressees(instruction)
        match instruction:
            case RunBatch():
                self._outstanding.begin_batch(instruction.batch_id, workers)
                self._begin_batch(instruction)
            case MoveKV():
                self._outstanding.begin_migration(instruction.migration_id, workers)
            case ExtendLease() | StopLease() | ReleaseKV():
                pass
            case _:
                assert_never(instruction)
        self._send(workers, encode(instruction))

    def _begin_batch(self, told: RunBatch) -> None:
        self._to_foresee[told.batch_id] = told.plan
        if self._in_order.tell(told.batch_id, told.plan.group.instance_ids):
            self._set_alarm(told.batch_id)

    def _set_alarm(self, batch_id: int) -> None:
        """A batch begins now; its end is foreseen in time."""
        plan, now = self._to_foresee[batch_id], self.now
        if self._lead is not None and (end := self._lead.foresee(batch_id, plan, now)) is not None:
            loop = asyncio.get_running_loop()
            self._alarms[batch_id] = loop.call_later(end.time - now, self._foresee, end)

    def _foresee(self, end: EndForeseen) -> None:
        del self._alarms[end.batch_id]
        self.post(replace(end, time=self.now))

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
        while self._reports.poll(0):  # to find none left by an error takes three times as long
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

    def _send(self, workers: Iterable[WorkerId], frame: bytes) -> None:
        for worker_id in workers:
            self._commands[worker_id].send(frame)

    def _translate(self, report: Report) -> None:
        match report:
            case StepDone():  # first, as most are
                self._start(report.batch_id)
                self.post(TokensProduced(self.now, report.batch_id, report.step, report.tokens))
            case WorkerReady():
                self._not_ready.discard((report.instance_id, report.tp_rank))
                if not self._not_ready and not self._ready.done():
                    self._ready.set_result(None)
            case Heartbeat():
                self._last_heard[report.instance_id, report.tp_rank] = monotonic()
            case BatchBegun():
                if self._outstanding.is_last_to_begin(report):
                    self._start(report.batch_id)
            case BatchDone():
                if report.tokens or self._outstanding.is_last_to_begin(report):
                    self._start(report.batch_id)
                if reports := self._outstanding.end_batch(report):
                    self._end_batch(reports)
                elif report.tokens:  # now, for those of a batch behind may come before the others are done
                    self._tell_tokens(report)
            case MigrationDone():
                if (is_committed := self._outstanding.end_migration(report)) is not None:
                    self.post(MigrationFinished(self.now, report.migration_id, is_committed))
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

    def _start(self, batch_id: int) -> None:
        """Post the start of a batch, unless it has started, and before it those of all that it is behind.

        Reports of several workers have no order: tokens may come from one while another has yet to begin.
        """
        if self._outstanding.start(batch_id):
            for before_id in self._in_order.before(batch_id):
                self._start(before_id)
            self.post(BatchStarted(self.now, batch_id))

    def _tell_tokens(self, report: BatchDone) -> None:
        self.post(TokensProduced(self.now, report.batch_id, report.num_steps - 1, report.tokens))

    def _end_batch(self, reports: Sequence[BatchDone]) -> None:
        last = reports[-1]
        batch_id = last.batch_id
        if last.tokens:
            self._tell_tokens(last)
        self.post(BatchFinished(self.now, batch_id, last.num_steps))
        del self._to_foresee[batch_id]
        if (alarm := self._alarms.pop(batch_id, None)) is not None:
            alarm.cancel()
        for told in self._holding.end(batch_id, chain.from_iterable(report.tokens for report in reports)):
            self._tell(told)
        for begun_id in self._in_order.end(batch_id):
            self._set_alarm(begun_id)


def joined(events: Iterable[Event]) -> list[Event]:
    """The same, with what masters tell of one step one after the other as one event, told with the last.

    To take in an event costs as much as some tokens of it do.
    """
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if (
            isinstance(event, TokensProduced)
            and isinstance(last, TokensProduced)
            and (event.batch_id, event.step) == (last.batch_id, last.step)
        ):
            found[-1] = TokensProduced(event.time, event.batch_id, event.step, last.tokens + event.tokens)
        else:
            found.append(event)
    return found
