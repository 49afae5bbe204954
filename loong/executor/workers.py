"""Carries instructions out on real workers."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import assert_never

import zmq

from loong.core.errors import ClusterError
from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    Drained,
    Event,
    InstanceLost,
    MigrationFinished,
    TokensProduced,
)
from loong.core.grammar import Grammar
from loong.core.instructions import ExtendLease, Instruction, MoveKV, ReleaseKV, RunBatch, StopLease
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.prompt_logprobs import PromptLogprobs
from loong.executor.answers import Answers
from loong.executor.batch_queue import BatchQueue
from loong.executor.endpoints import Endpoints, WorkerId
from loong.executor.heartbeats import Heartbeats
from loong.executor.held_instructions import HeldInstructions
from loong.executor.lookahead import LookaheadMargin
from loong.executor.losses import Losses
from loong.executor.outstanding import Outstanding, measured_seconds
from loong.stray_frames import StrayFrames
from loong.stream import Stream
from loong.wire import (
    HEARTBEAT_SECONDS,
    MAX_FRAME_BYTES,
    BatchBegun,
    BatchDone,
    CommandDone,
    EndTrace,
    Heartbeat,
    MigrationDone,
    PrepareGrammar,
    PromptScored,
    Report,
    Shutdown,
    StartTrace,
    StepDone,
    WireError,
    WorkerFailed,
    WorkerReady,
    address,
    decode_report,
    encode,
)

MAX_GRAMMAR_SECONDS = 60.0  # for all workers: one schema takes 2 s at most, but others may come before it
MAX_TRACE_START_SECONDS = 120.0  # a worker begins between two steps, and no step takes longer
MAX_TURN_SECONDS = 0.005  # of a caller that takes events, after which other tasks run


class WorkersExecutor:
    """An `Executor` whose events are the reports of workers, and those that `post` adds.

    Ends are reported before they come by the margin `lookahead`; without it, none is predicted. Workers send
    a heartbeat every `heartbeat` seconds.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        lookahead: LookaheadMargin | None = None,
        heartbeat: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._endpoints, self._lookahead = endpoints, lookahead
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._reports = self._context.socket(zmq.PULL)
        self._reports.setsockopt(zmq.RCVHWM, 0)
        self._reports.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._reports.bind(address(endpoints.reports))
        self._commands = {worker_id: self._connect(where) for worker_id, where in endpoints.commands.items()}
        self._events = Stream[Event | Drained | BaseException]()
        self._ending: Drained | BaseException | None = None  # the end after the last event
        self._turn_began_at = monotonic()
        self._outstanding = Outstanding()
        self._held_instructions = HeldInstructions()
        self._batch_queue = BatchQueue()
        self._to_predict: dict[int, BatchPlan] = {}  # batches in flight
        self._alarms: dict[int, asyncio.TimerHandle] = {}
        self._not_ready = set(endpoints.commands)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers = Answers(endpoints.commands)
        self._heartbeats = Heartbeats(endpoints.commands, heartbeat)
        self._losses = Losses(self._declare_lost)
        self._strays = StrayFrames("the engine's socket for reports")
        self._num_strays = dict.fromkeys(endpoints.commands, 0)  # of each worker's sockets
        self._started_at = monotonic()
        self.take_prompt_logprobs: Callable[[PromptLogprobs], None] = lambda _: None

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address(endpoint))
        return socket

    @property
    def now(self) -> float:
        """Return the seconds since the start, the clock of all events."""
        return monotonic() - self._started_at

    @property
    def seconds_since_heard(self) -> float:
        """Return the longest silence of a worker; a pause of this process does not count."""
        return self._heartbeats.silent_seconds

    @property
    def num_stray_frames(self) -> int:
        """Return the frames that were dropped on the sockets of this process and of the workers."""
        return self._strays.num_dropped + sum(self._num_strays.values())

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
        """Add an event of this process to the stream."""
        self._events.put(event)

    def lose(self, worker_id: WorkerId, reason: str) -> None:
        """Record that a worker is gone. The instance that is then lost is the one that failed first."""
        self._losses.end(worker_id, reason)

    def _declare_lost(self, instance_id: InstanceId, reason: str) -> None:
        if not self._ready.done():
            self._ready.set_exception(ClusterError(f"instance {instance_id} did not start: {reason}"))
        self.post(InstanceLost(self.now, instance_id, reason))

    def fail(self, error: BaseException) -> None:
        """Raise this error in `next_events`, after the events so far."""
        self._events.put(error)

    async def next_events(self) -> Sequence[Event]:
        """Return all events so far, in the order in which they became known.

        Raises the error of `fail`, and `InvalidEventError` if workers contradict each other.
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
                    self._held_instructions.forget(item.batch_id)
                events.append(item)
        if isinstance(self._ending, BaseException) and not events:
            raise self._ending
        return joined(events)

    async def _let_others_run(self) -> None:
        """Suspend if the last suspension was long ago: taking available events does not suspend."""
        if monotonic() - self._turn_began_at > MAX_TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn_began_at = monotonic()

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Send each instruction to the workers that have a part in it, once they can."""
        for instruction in instructions:
            if (ready := self._held_instructions.take(instruction)) is not None:
                self._send_instruction(ready)

    def _send_instruction(self, instruction: Instruction) -> None:
        workers = self._endpoints.addressees(instruction)
        match instruction:
            case RunBatch():
                self._outstanding.begin_batch(instruction.batch_id, self._endpoints.members(instruction))
                self._begin_batch(instruction)
            case MoveKV():
                self._outstanding.begin_migration(instruction.migration_id, workers)
            case ExtendLease() | StopLease() | ReleaseKV():
                pass
            case _:
                assert_never(instruction)
        self._send(workers, encode(instruction))

    def _begin_batch(self, instruction: RunBatch) -> None:
        self._to_predict[instruction.batch_id] = instruction.plan
        if self._batch_queue.enqueue(instruction.batch_id, instruction.plan.group.instance_ids):
            self._set_alarm(instruction.batch_id)

    def _set_alarm(self, batch_id: int) -> None:
        """Predict the end of a batch that begins now, at the right time."""
        plan, now = self._to_predict[batch_id], self.now
        if (
            self._lookahead is not None
            and (end := self._lookahead.predict_end(batch_id, plan, now)) is not None
        ):
            loop = asyncio.get_running_loop()
            self._alarms[batch_id] = loop.call_later(end.time - now, self._predict_end, end)

    def _predict_end(self, end: BatchEndPredicted) -> None:
        del self._alarms[end.batch_id]
        self.post(replace(end, time=self.now))

    async def read_reports(self) -> None:
        """Turn reports into events until cancelled.

        Raises `InvalidEventError` if workers contradict each other.
        """
        readable, loop = asyncio.Event(), asyncio.get_running_loop()
        descriptor = self._reports.fileno()
        loop.add_reader(descriptor, readable.set)
        try:
            while True:
                readable.clear()
                self._drain()  # completely: the descriptor signals new frames only when none are left
                await readable.wait()
        finally:
            loop.remove_reader(descriptor)

    def _drain(self) -> None:
        while self._reports.poll(0):  # to find none left by an error takes three times as long
            self.receive(self._reports.recv(zmq.NOBLOCK))

    def receive(self, frame: bytes) -> None:
        """Turn one worker's report into events; drop frames that are no report, or of unknown work.

        Raises `InvalidEventError` if it contradicts another's.
        """
        try:
            report = decode_report(frame)
        except WireError as error:
            self._strays.drop("a frame that is no report", str(error))
            return
        if self._is_expected(report):
            self._translate(report)
        else:
            self._strays.drop(f"a {type(report).__name__} that is not expected", repr(report))

    def _is_expected(self, report: Report) -> bool:
        """Return whether a report is of a known worker, and of work that it has not reported as done."""
        if isinstance(report, StepDone):  # first, as most are
            return report.batch_id in self._to_predict
        worker_id = report.instance_id, report.tp_rank
        match report:
            case BatchBegun() | PromptScored() | BatchDone():
                return self._outstanding.has_batch(report.batch_id, worker_id)
            case MigrationDone():
                return self._outstanding.has_migration(report.migration_id, worker_id)
            case _:
                return worker_id in self._endpoints.commands

    async def watch_silence(self) -> None:
        """Once all are ready, declare a worker lost that misses too many heartbeats; runs until cancelled."""
        await self._ready
        while (lost := self._heartbeats.lost()) is None:
            await asyncio.sleep(self._heartbeats.seconds)
            self._heartbeats.count_missed()
            self._drain()  # what came during a pause of this process
        self.lose(lost, f"it was silent for {self._heartbeats.silent_seconds:g} s")

    def prepare_grammar(self, grammar: Grammar) -> asyncio.Future[None]:
        """Let all workers compile a grammar, before a request that needs it is planned.

        The future is done when all have, and raises `ClusterError` if one cannot, or not in time.
        """
        number, done = self._answers.expect("compile a grammar", MAX_GRAMMAR_SECONDS)
        self._send(self._endpoints.commands, encode(PrepareGrammar(number, grammar)))
        return done

    async def start_traces(self) -> None:
        """Start traces on all workers, and return once all have begun.

        Raises `ClusterError` if one could not, or not in time; then none goes on.
        """
        number, begun = self._answers.expect("begin a trace", MAX_TRACE_START_SECONDS)
        self._send(self._endpoints.commands, encode(StartTrace(number)))
        try:
            await begun
        except ClusterError:
            number, dropped = self._answers.expect("drop a trace", MAX_TRACE_START_SECONDS)
            dropped.add_done_callback(lambda done: done.exception())  # its result is not needed
            self._send(self._endpoints.commands, encode(EndTrace(number, None)))
            raise

    async def write_traces(self, folder: Path) -> Mapping[WorkerId, Path]:
        """Let all workers end their traces after what was submitted, and wait for the file of each.

        Raises `ClusterError` if one cannot write it.
        """
        files = {(i, rank): folder / f"worker-{i}-{rank}.json" for i, rank in self._endpoints.commands}
        number, written = self._answers.expect("write its trace")
        for worker_id, path in files.items():
            self._send([worker_id], encode(EndTrace(number, str(path))))
        await written
        return files

    def shut_down(self) -> None:
        """Ask all workers to end."""
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
                worker_id = report.instance_id, report.tp_rank
                self._heartbeats.hear(worker_id)
                self._num_strays[worker_id] = report.num_stray_frames
            case BatchBegun():
                if self._outstanding.is_last_to_begin(report):
                    self._start(report.batch_id)
            case BatchDone():
                if report.tokens or self._outstanding.is_last_to_begin(report):
                    self._start(report.batch_id)
                if reports := self._outstanding.end_batch(report):
                    self._end_batch(reports)
                elif (
                    report.tokens
                ):  # now, since tokens of a later batch may come before the other workers are done
                    self._report_tokens(report)
            case PromptScored():
                self.take_prompt_logprobs(report.logprobs)
            case MigrationDone():
                if (is_committed := self._outstanding.end_migration(report)) is not None:
                    self.post(MigrationFinished(self.now, report.migration_id, is_committed))
            case CommandDone():
                self._answers.take(report)
            case WorkerFailed():
                self._losses.take(report)
            case _:
                assert_never(report)

    def _start(self, batch_id: int) -> None:
        """Post the start of a batch, unless it has started, after those of all batches before it.

        Reports of several workers have no order: tokens may come from one while another has yet to begin.
        """
        if self._outstanding.start(batch_id):
            for before_id in self._batch_queue.before(batch_id):
                self._start(before_id)
            self.post(BatchStarted(self.now, batch_id))

    def _report_tokens(self, report: BatchDone) -> None:
        self.post(TokensProduced(self.now, report.batch_id, report.num_steps - 1, report.tokens))

    def _end_batch(self, reports: Sequence[BatchDone]) -> None:
        last = reports[-1]
        batch_id = last.batch_id
        if last.tokens:
            self._report_tokens(last)
        self.post(BatchFinished(self.now, batch_id, last.num_steps, measured_seconds(reports)))
        del self._to_predict[batch_id]
        if (alarm := self._alarms.pop(batch_id, None)) is not None:
            alarm.cancel()
        for instruction in self._held_instructions.end(
            batch_id, chain.from_iterable(report.tokens for report in reports)
        ):
            self._send_instruction(instruction)
        for begun_id in self._batch_queue.end(batch_id):
            self._set_alarm(begun_id)


def joined(events: Iterable[Event]) -> list[Event]:
    """Merge consecutive `TokensProduced` of the same step into one event, at the time of the last.

    Applying an event costs as much as some of its tokens.
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
