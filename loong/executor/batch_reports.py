"""The events that follow from what workers report of batches in flight."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from loong.core.events import BatchFinished, BatchStarted, Event, TokensProduced
from loong.core.prompt_logprobs import PromptLogprobs
from loong.executor.in_flight import InFlight, Stage, SubmittedBatch
from loong.executor.losses import Losses
from loong.executor.recovery import Recovery
from loong.messages.wire import (
    BatchBegun,
    BatchDone,
    BatchFailed,
    BatchReport,
    PromptScored,
    StepDone,
    WorkerFailed,
)


@dataclass(slots=True)
class BatchReports:
    """Turns reports of the batches `in_flight` into events, which go to `post`.

    `now` returns the present time. `take_left` takes a batch that has ended, or that is void and was left by
    a worker. `take_prompt_logprobs` takes those of a chunk.
    """

    in_flight: InFlight
    recovery: Recovery
    losses: Losses
    now: Callable[[], float]
    post: Callable[[Event], None]
    take_left: Callable[[SubmittedBatch], None]
    take_prompt_logprobs: Callable[[PromptLogprobs], None]

    def take(self, batch: SubmittedBatch, report: BatchReport) -> None:
        """Take a report that is expected.

        Raises `InvalidEventError` if it contradicts another's.
        """
        match report:
            case StepDone():  # first, as most are
                if batch.stage is Stage.VOID:  # its tokens are computed again
                    return
                if batch.not_begun:
                    self.start(batch)
                if report.is_last:
                    batch.last_tokens += report.tokens
                self.post(TokensProduced(self.now(), report.batch_id, report.step, report.tokens))
            case BatchBegun():
                if batch.starts_on(report.instance_id):
                    self.start(batch)
            case PromptScored():
                self.take_prompt_logprobs(report.logprobs)
            case BatchFailed():
                self.recovery.fail(batch)
                if report.blamed is not None:
                    failed = report.instance_id, report.tp_rank, report.message, report.blamed
                    self.losses.take(WorkerFailed(*failed), lives_on=True)
                self._leave(batch, report)
            case BatchDone() if batch.stage is Stage.VOID:
                self._leave(batch, report)
            case BatchDone():
                self._end(batch, report)
            case _:
                assert_never(report)

    def start(self, batch: SubmittedBatch) -> None:
        """Post the start of a batch, unless it has started, after those of all batches before it.

        Reports of several workers have no order: tokens may come from one while another has yet to begin.
        """
        if batch.start():
            for before_id in batch.behind:
                self.start(self.in_flight[before_id])
            self.post(BatchStarted(self.now(), batch.batch_id))

    def _leave(self, batch: SubmittedBatch, report: BatchDone | BatchFailed) -> None:
        batch.workers.discard((report.instance_id, report.tp_rank))
        self.take_left(batch)

    def _end(self, batch: SubmittedBatch, report: BatchDone) -> None:
        if batch.starts_on(report.instance_id):
            self.start(batch)
        if batch.take_done(report):
            self.post(BatchFinished(self.now(), batch.batch_id, report.num_steps, batch.seconds))
            self.take_left(batch)
