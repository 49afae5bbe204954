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
    Drained,
    Event,
    InstanceLost,
    MigrationFinished,
)
from loong.core.instructions import (
    ExtendLease,
    Instruction,
    LendSlots,
    MoveKV,
    ReleaseKV,
    ReleaseWindows,
    RunBatch,
    ShareKV,
    StopLease,
)
from loong.core.placement import InstanceId
from loong.core.prompt_logprobs import PromptLogprobs
from loong.executor.batch_queue import BatchQueue, Ready
from loong.executor.batch_reports import BatchReports
from loong.executor.endpoints import Endpoints, WorkerId
from loong.executor.event_stream import EventStream
from loong.executor.in_flight import InFlight, Stage, SubmittedBatch
from loong.executor.lookahead import EndPredictions, LookaheadMargin
from loong.executor.losses import Losses
from loong.executor.membership import Membership
from loong.executor.outstanding import Outstanding
from loong.executor.recovery import Recovery, Restarts
from loong.executor.worker_reports import WorkerReports
from loong.messages.stray_frames import StrayFrames
from loong.messages.wire import HEARTBEAT_SECONDS, ForgetFailures, Shutdown, SlotsLent

logger = logging.getLogger(__name__)


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
        self.members = Membership(
            endpoints, heartbeat, self._strays, lambda event_at: self.post(event_at(self.now)), restarts
        )
        self.restarts = restarts
        self._sockets, self.calls = self.members.sockets, self.members.calls
        self._events = EventStream()
        self._in_flight = InFlight()
        self._outstanding = Outstanding()
        self._queue = BatchQueue(self._in_flight)
        self._end_predictions = EndPredictions(lookahead, self._predict_end)
        self._losses = Losses(self._declare_lost)
        self._recovery = Recovery(self._in_flight)
        self.take_prompt_logprobs: Callable[[PromptLogprobs], None] = lambda _: None
        self.take_lent: Callable[[SlotsLent], None] = lambda _: None
        self._reports = BatchReports(
            self._in_flight,
            self._recovery,
            self._losses,
            now=lambda: self.now,
            post=self._events.put,
            take_left=self._take_left,
            take_prompt_logprobs=lambda part: self.take_prompt_logprobs(part),
        )
        self._worker_reports = WorkerReports(
            self._in_flight,
            self._outstanding,
            self.members,
            self._losses,
            self._reports,
            self._strays,
            join=self._join,
            end_migration=self._end_migration,
            take_lent=lambda report: self.take_lent(report),
            replaced=restarts is not None,
        )
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
        return self.restarts.trouble() if self.restarts is not None else ""

    @property
    def num_stray_frames(self) -> int:
        """Return the frames that were dropped on the sockets of this process and of the workers."""
        return self._strays.num_dropped + sum(self._worker_reports.num_strays.values())

    def post(self, event: Event | Drained) -> None:
        """Add an event of this process to the stream."""
        self._events.put(event)

    def lose(self, worker_id: WorkerId, reason: str) -> None:
        """Record that a worker is gone, unless its instance was dropped before.

        The instance that is then lost is the one that failed first.
        """
        if worker_id not in self.members.endpoints.commands:
            return
        if self.restarts is not None and self.members.is_starting(worker_id[0]):
            logger.warning("instance %d did not start: %s", worker_id[0], reason)
            self.members.drop(worker_id[0])
            self.restarts.end(worker_id[0])
            self.members.start_again(worker_id[0])
            self._check_members()
        else:
            self._losses.end(worker_id, reason)

    def _declare_lost(self, instance_id: InstanceId, reason: str) -> None:
        if self.members.fails_to_start(instance_id, reason):
            return
        if self.restarts is None:
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
        self.restarts.end(instance_id)
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

    def _end_migration(self, migration_id: int, is_committed: bool) -> None:
        self.post(MigrationFinished(self.now, migration_id, is_committed))
        self._report_losses()

    def fail(self, error: BaseException) -> None:
        """Raise this error in `next_events`, after the events so far."""
        self._events.put(error)

    async def next_events(self) -> Sequence[Event]:
        """Return all events so far, in the order in which they became known.

        Raises the error of `fail`, and `InvalidEventError` if workers contradict each other.
        """
        self._end_predictions.end_planning()
        return await self._events.take(self._drain, self._seen)

    def _seen(self, event: Event) -> Event:
        """Return an event as the engine is to see it. Batches that it plans after a loss are not void."""
        if isinstance(event, BatchFinished):
            self._in_flight.report(event.batch_id)
        if self.restarts is None or not isinstance(event, InstanceLost):
            return event
        self._close_void(self._recovery.see(event.instance_id))
        event = replace(event, void_batch_ids=self._recovery.report())
        self._sockets.send(self.members.endpoints.commands, ForgetFailures(event.void_batch_ids))
        return event

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
            case ExtendLease() | StopLease() | ReleaseKV() | ReleaseWindows() | ShareKV() | LendSlots():
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
        self._worker_reports.receive(frame)

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
