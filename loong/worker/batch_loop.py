"""Runs batches in the order of submission: while the device computes one, the next is prepared."""

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Protocol

from loong.core.events import ProducedToken
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.fabric.errors import AbandonedError, PeerError
from loong.messages.wire import BatchBegun, BatchDone, BatchFailed, ForgetFailures, PromptScored, StepDone
from loong.worker.batches.lease_ends import LeaseEnds
from loong.worker.batches.started_batch import StartedBatch
from loong.worker.runner import BatchRunner

_LOOK_SECONDS = 100e-6  # between checks whether the device is done


class SendReports(Protocol):
    """Sends reports to the engine, which gets them together."""

    def __call__(self, *reports: BatchBegun | StepDone | PromptScored | BatchDone | BatchFailed) -> None:
        """Send them in this order."""


class BatchLoop:
    """Begins batches and finishes them, and reports what they produce; for one thread.

    A batch fails when a peer does not do its part. Batches of the same requests that were submitted behind it
    fail too, until the engine says that it knows.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        tp_rank: int,
        runner: BatchRunner,
        lease_ends: LeaseEnds,
        send: SendReports,
        trace: Callable[[], None],
    ) -> None:
        """Take the report function, and the function that runs at each step boundary."""
        self._instance_id, self._tp_rank = instance_id, tp_rank
        self._runner, self._lease_ends = runner, lease_ends
        self._send, self._trace = send, trace
        self._started: StartedBatch | None = None
        self._before: StartedBatch | None = None  # the one before a batch that is begun at present
        self._failed: dict[int, tuple[RequestId, ...]] = {}  # requests of batches that have failed
        self._began_at = 0.0  # when the device started its present batch

    def turn(self, commands: "SimpleQueue[RunBatch | ForgetFailures | None]") -> None:
        """Wait for the next command or for the device: begin a batch, and finish the one before.

        None in the queue is no batch, but requests the actions of a step boundary.
        """
        command = self._wait(commands)
        self._before, self._started = self._started, None
        if command is None:
            self._finish_before(None)
        else:
            if self._before is None:
                self._report_begin(command)
            self._started = self._begin(command)
            self._finish_before(None if self._started is None else command)
        self._trace()

    def _finish_before(self, following: RunBatch | None) -> None:
        """Finish the batch before, unless that was done, and report that the device has come to the
        `following` one, which was prepared.
        """
        before, self._before = self._before, None
        if before is not None:
            self._finish(before)
            if following is not None:
                self._report_begin(following)

    def _begin(self, command: RunBatch) -> StartedBatch | None:
        """Begin a batch, unless one of its requests was in a batch that failed."""

        def finish_what_is_done() -> None:
            if self._before is not None and self._before.is_done():
                self._finish_before(command)

        failed = {request_id for request_ids in self._failed.values() for request_id in request_ids}
        if failed.isdisjoint(command.plan.request_ids):
            return self._runner.begin(command, finish_what_is_done)
        self._finish_before(None)  # the fabric takes batches in order
        self._runner.abandon(command)
        self._fail(command, "a batch before it failed", None)
        return None

    def _fail(self, command: RunBatch, message: str, blamed: tuple[InstanceId, int] | None) -> None:
        self._failed[command.batch_id] = command.plan.request_ids
        self._lease_ends.forget_up_to(command.batch_id)
        self._send(BatchFailed(command.batch_id, self._instance_id, self._tp_rank, message, blamed))

    def _report_begin(self, command: RunBatch) -> None:
        self._began_at = monotonic()
        if self._tp_rank == 0:  # all ranks begin together
            self._send(BatchBegun(command.batch_id, self._instance_id, self._tp_rank))

    def _wait(self, commands: "SimpleQueue[RunBatch | ForgetFailures | None]") -> RunBatch | None:
        """Return the next batch; None if the started batch is to be finished first."""
        if self._started is None:
            return self._batch_of(commands.get())
        while not self._started.needs_host():
            with suppress(Empty):
                return self._batch_of(commands.get_nowait())  # first: a device that is done waits for it
            if self._started.is_done():
                break
            with suppress(Empty):
                return self._batch_of(commands.get(timeout=_LOOK_SECONDS))
        return None

    def _batch_of(self, command: RunBatch | ForgetFailures | None) -> RunBatch | None:
        if isinstance(command, ForgetFailures):
            for batch_id in command.batch_ids:
                self._failed.pop(batch_id, None)
            return None
        return command

    def _finish(self, started: StartedBatch) -> None:
        try:
            self._complete(started)
        except AbandonedError as error:
            self._fail(started.command, str(error), None)
        except PeerError as error:
            self._fail(started.command, str(error), (error.instance_id, error.tp_rank))

    def _complete(self, started: StartedBatch) -> None:
        batch_id = started.command.batch_id
        last: list[StepDone] = []  # leaves with the end of the batch

        def report_step(step: int, tokens: tuple[ProducedToken, ...], is_last: bool) -> None:
            if tokens and self._tp_rank == 0:  # all ranks sample the same
                done = StepDone(batch_id, step, tokens, is_last)
                if is_last:
                    last.append(done)
                else:
                    self._send(done)
            if not is_last:
                self._trace()  # a long lease has no batch end to wait for

        num_steps = started.finish(self._lease_ends.of(started.command), report_step)
        self._lease_ends.forget_up_to(batch_id)
        if self._tp_rank == 0:  # all ranks find the same
            for found in started.prompt_logprobs():
                self._send(PromptScored(batch_id, self._instance_id, self._tp_rank, found))
        worked = self._began_at, monotonic()
        self._send(*last, BatchDone(batch_id, self._instance_id, self._tp_rank, num_steps, *worked))
