"""Carries instructions out on real workers."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import aclosing
from dataclasses import replace
from time import monotonic
from typing import assert_never

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
    joined,
)
from loong.core.instructions import ExtendLease, Instruction, MoveKV, ReleaseKV, RunBatch, ShareKV, StopLease
from loong.core.placement import InstanceId
from loong.core.prompt_logprobs import PromptLogprobs
from loong.executor.batch_queue import BatchQueue, Ready
from loong.executor.batch_reports import BatchReports
from loong.executor.endpoints import Endpoints, WorkerId
from loong.executor.in_flight import InFlight, Stage, SubmittedBatch
from loong.executor.lookahead import EndPredictions, LookaheadMargin
from loong.executor.losses import Losses
from loong.executor.membership import Membership
from loong.executor.outstanding import Outstanding
from loong.executor.recovery import Recovery, Restarts
from loong.messages.stray_frames import StrayFrames
from loong.messages.stream import Stream
from loong.messages.wire import (
    HEARTBEAT_SECONDS,
    BatchBegun,
    BatchDone,
    BatchFailed,
    CommandDone,
    ForgetFailures,
    Heartbeat,
    MigrationDone,
    PromptScored,
    Shutdown,
    StepDone,
    WireError,
    WorkerFailed,
    WorkerReady,
    WorkerReport,
    decode_report,
)

logger = logging.getLogger(__name__)

_OF_BATCHES = BatchStarted | TokensProduced | BatchEndPredicted | BatchFinished
MAX_TURN_SECONDS = 0.005  # of a caller that takes events, after which other tasks run


class WorkersExecutor:
    """An `Executor` whose events are the reports of workers, and those that `post` adds.

    Ends are reported before they come by the margin `lookahead`; without it, none is predicted. Workers send
    a heartbeat every `heartbeat` seconds. With `restarts`, a lost instance is started again and joins;
    its new workers become `members`.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        lookahead: LookaheadMargin | None = None,
        heartbeat: float = HEARTBEAT_SECONDS,
        restarts: Restarts | None = None,
    ) -> None:
        self._strays = StrayFrames("the engine's socket for reports")
        self.members = Membership(endpoints, heartbeat, self._strays, self._report_membership, restarts)
        self._restarts = restarts
        self._sockets, self.calls = self.members.sockets, self.members.calls
        self._events = Stream[Event | Drained | BaseException]()
        self._ending: Drained | BaseException | None = None  # the end after the last event
        self._turn_began_at = monotonic()
        self._in_flight = InFlight()
        self._outstanding = Outstanding()
        self._queue = BatchQueue(self._in_flight)
        self._end_predictions = EndPredictions(lookahead, self._predict_end)
        self._losses = Losses(self._declare_lost)
        self._recovery = Recovery(self._in_flight)
        self.take_prompt_logprobs: Callable[[PromptLogprobs], None] = lambda _: None
        self._reports = BatchReports(
            self._in_flight,
            self._recovery,
            self._losses,
            now=lambda: self.now,
            post=self._events.put,
            take_left=self._take_left,
            take_prompt_logprobs=lambda part: self.take_prompt_logprobs(part),
        )
        self._num_strays = dict.fromkeys(endpoints.commands, 0)  # of each worker's sockets
        self._started_at = monotonic()

    @property
    def now(self) -> float:
        """Return the seconds since the start, the clock of all events."""
        return monotonic() - self._started_at

    @property
    def silences(self) -> Mapping[InstanceId, float]:
        """Return the seconds since each instance was heard from; a pause of this process does not count."""
        return self.members.heartbeats.silences

    @property
    def quarantined(self) -> Set[InstanceId]:
        """Return the instances that failed too often to be started again."""
        return self.members.quarantined

    @property
    def trouble(self) -> str:
        """Return the reason why no lost instance can start again, an empty string if there is none."""
        return self._restarts.trouble() if self._restarts is not None else ""

    @property
    def restarts(self) -> Restarts | None:
        """Return how lost instances are started again, None if they are not."""
        return self._restarts

    @property
    def num_stray_frames(self) -> int:
        """Return the frames that were dropped on the sockets of this process and of the workers."""
        return self._strays.num_dropped + sum(self._num_strays.values())

    def post(self, event: Event | Drained) -> None:
        """Add an event of this process to the stream."""
        self._events.put(event)

    def _report_membership(self, event_at: Callable[[float], Event]) -> None:
        self.post(event_at(self.now))

    def lose(self, worker_id: WorkerId, reason: str) -> None:
        """Record that a worker is gone, unless its instance was dropped before.

        The instance that is then lost is the one that failed first.
        """
        if worker_id not in self.members.endpoints.commands:
            return
        if self._restarts is not None and self.members.is_starting(worker_id[0]):
            logger.warning("instance %d did not start: %s", worker_id[0], reason)
            self.members.drop(worker_id[0])
            self._restarts.end(worker_id[0])
            self.members.start_again(worker_id[0])
            self._check_members()
        else:
            self._losses.end(worker_id, reason)

    def _declare_lost(self, instance_id: InstanceId, reason: str) -> None:
        if self.members.fails_to_start(instance_id, reason):
            return
        if self._restarts is None:
            self.post(InstanceLost(self.now, instance_id, reason))
            return
        logger.error("instance %d was lost: %s", instance_id, reason)
        for batch in self._in_flight.values():
            if batch.has_begun_on(instance_id):
                self._reports.start(batch)  # the others may never begin what ended this one
        workers = self.members.drop(instance_id)
        self._recovery.lose(instance_id, reason)
        self._queue.drop(self._recovery.refuses)
        for batch in self._in_flight.values():
            batch.workers.difference_update(workers)
        for migration_id in self._outstanding.drop_workers(workers):
            self.post(MigrationFinished(self.now, migration_id, is_committed=False))
        self._restarts.end(instance_id)
        self._report_losses()

    def _report_losses(self) -> None:
        """Post the losses whose void batches all workers have left, and start these instances again."""
        if self._outstanding.has_one_ended_moves:
            return
        left, losses = self._recovery.settle()
        self._close_void(left)
        for instance_id, reason in losses.items():
            self.members.lose(instance_id, reason)
        self._check_members()

    def _check_members(self) -> None:
        """End the events with an error once all instances are quarantined."""
        if not self.members.wanted:
            self.fail(ClusterError("no instance is left: all failed again and again, and are quarantined"))

    def _close_void(self, left: Iterable[SubmittedBatch]) -> None:
        self._queue.drop(self._recovery.refuses)
        for batch in left:
            self._close(batch)

    def _join(self, instance_id: InstanceId) -> None:
        """Post that an instance has joined, for the first time or again."""
        self._losses.rejoin(instance_id)
        self.members.join(instance_id)

    def fail(self, error: BaseException) -> None:
        """Raise this error in `next_events`, after the events so far."""
        self._events.put(error)

    async def next_events(self) -> Sequence[Event]:
        """Return all events so far, in the order in which they became known.

        Raises the error of `fail`, and `InvalidEventError` if workers contradict each other.
        """
        events: list[Event] = []
        self._end_predictions.end_planning()
        if self._ending is None:
            await self._let_others_run()
            self._drain()
            void = set[int]()  # of losses in this list: their later events are void too
            for item in await self._events.get_all():
                if isinstance(item, Drained | BaseException):
                    self._ending = item
                    break
                if void and isinstance(item, _OF_BATCHES) and item.batch_id in void:
                    continue
                if isinstance(item, BatchFinished):
                    self._in_flight.report(item.batch_id)
                if isinstance(item, InstanceLost):
                    item = self._with_void_batches(item)
                    void.update(item.void_batch_ids)
                events.append(item)
        if isinstance(self._ending, BaseException) and not events:
            raise self._ending
        return joined(events)

    def _with_void_batches(self, event: InstanceLost) -> InstanceLost:
        """Return a loss as the engine is to see it. Batches that it plans from then on are not void."""
        if self._restarts is None:
            return event
        self._close_void(self._recovery.see(event.instance_id))
        event = replace(event, void_batch_ids=self._recovery.report())
        self._sockets.send(self.members.endpoints.commands, ForgetFailures(event.void_batch_ids))
        return event

    async def _let_others_run(self) -> None:
        """Suspend if the last suspension was long ago: taking available events does not suspend."""
        if monotonic() - self._turn_began_at > MAX_TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn_began_at = monotonic()

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Send each instruction to the workers that have a part in it, once they can."""
        for instruction in instructions:
            if isinstance(instruction, RunBatch):
                self._end_predictions.take_plan(self.now)
            if not self._recovery.accepts(instruction):
                continue
            if (ready := self._queue.take(instruction)) is not None:
                self._carry_out(ready)

    def _carry_out(self, ready: Ready) -> None:
        instruction = ready.instruction
        workers = self.members.endpoints.addressees(instruction)
        match instruction:
            case RunBatch():
                batch = self._in_flight[instruction.batch_id]
                batch.send(self.members.endpoints.members(instruction))
                if ready.begins:
                    self._end_predictions.begin(batch, self.now)
            case MoveKV():
                self._outstanding.begin_migration(instruction.migration_id, workers)
            case ExtendLease() | StopLease() | ReleaseKV() | ShareKV():
                pass
            case _:
                assert_never(instruction)
        self._sockets.send(workers, instruction)

    def _predict_end(self, end: BatchEndPredicted) -> None:
        self.post(replace(end, time=self.now))

    async def read_reports(self) -> None:
        """Turn reports into events until cancelled.

        Raises `InvalidEventError` if workers contradict each other.
        """
        async with aclosing(self._sockets.arrivals()) as arrivals:
            async for _ in arrivals:
                self._drain()

    def _drain(self) -> None:
        for frame in self._sockets.frames():
            self.receive(frame)

    def receive(self, frame: bytes) -> None:
        """Turn one worker's report into events; drop frames that are no report, or of unknown work.

        Raises `InvalidEventError` if it contradicts another's.
        """
        try:
            report = decode_report(frame)
        except WireError as error:
            self._strays.drop("a frame that is no report", str(error))
            return
        match report:
            case StepDone() | BatchBegun() | PromptScored() | BatchDone() | BatchFailed():  # most are
                batch = self._in_flight.get(report.batch_id)
                if batch is not None and batch.expects(report):
                    self._reports.take(batch, report)
                    return
                is_of_a_loss = report.batch_id in self._in_flight.void_ids
            case _ if self._is_expected(report):
                self._translate(report)
                return
            case _:
                is_known = report.instance_id < self.members.endpoints.num_instances
                is_of_a_loss = self._restarts is not None and is_known
        if not is_of_a_loss:
            self._strays.drop(f"a {type(report).__name__} that is not expected", repr(report))

    def _is_expected(self, report: WorkerReport) -> bool:
        """Return whether a report is of a known worker, and of a migration that it has not reported."""
        worker_id = report.instance_id, report.tp_rank
        if isinstance(report, MigrationDone):
            return self._outstanding.has_migration(report.migration_id, worker_id)
        return worker_id in self.members.endpoints.commands

    async def watch_silence(self) -> None:
        """Once all are ready, declare workers lost that miss too many heartbeats; runs until cancelled."""
        await self.members.ready
        while True:
            await asyncio.sleep(self.members.heartbeats.seconds)
            self.members.heartbeats.count_missed()
            self._drain()  # what came during a pause of this process
            while (lost := self.members.heartbeats.lost()) is not None:
                silence = self.members.heartbeats.silences[lost[0]]
                self.members.heartbeats.drop([lost])
                self.lose(lost, f"it was silent for {silence:g} s")

    def shut_down(self) -> None:
        """Ask all workers to end."""
        self._sockets.send(self.members.endpoints.commands, Shutdown())

    def close(self) -> None:
        """Close all sockets; queued messages have a second to leave."""
        self._sockets.close()

    def _translate(self, report: WorkerReport) -> None:
        match report:
            case WorkerReady():
                if self.members.take_ready(report):
                    self._join(report.instance_id)
            case Heartbeat():
                worker_id = report.instance_id, report.tp_rank
                self.members.heartbeats.hear(worker_id)
                self._num_strays[worker_id] = report.num_stray_frames
            case MigrationDone():
                if (is_committed := self._outstanding.end_migration(report)) is not None:
                    self.post(MigrationFinished(self.now, report.migration_id, is_committed))
                    self._report_losses()
            case CommandDone():
                self.calls.take(report)
            case WorkerFailed():
                self._losses.take(report)
            case _:
                assert_never(report)

    def _take_left(self, batch: SubmittedBatch) -> None:
        """Go on after a worker has left a batch, which has ended or is void."""
        if batch.stage is Stage.ENDED:
            self._close(batch)
        else:
            self._report_losses()

    def _close(self, batch: SubmittedBatch) -> None:
        """Carry out what waited for the end of a batch. KV that a void batch was to make does not migrate."""
        self._end_predictions.close(batch)
        released = self._queue.end(batch.batch_id, batch.last_tokens if batch.stage is Stage.ENDED else ())
        for ready in released.ready:
            if batch.stage is Stage.LEFT and isinstance(ready.instruction, MoveKV):
                migration_id = ready.instruction.migration_id
                self.post(MigrationFinished(self.now, migration_id, is_committed=False))
            elif not self._recovery.refuses(ready.instruction):
                self._carry_out(ready)
        for begun in released.begun:
            if begun.stage is Stage.SENT:
                self._end_predictions.begin(begun, self.now)
