"""The batches that were submitted to an executor, until the engine has seen their ends.

A batch is in one of these stages:

    queued ---> sent ---> ended ----> reported
       |          |                       ^
       +----------+---> void ---> left ---+

    queued    It waits for the ends of other batches, or it was refused.
    sent      Its workers have it, and some have yet to report its end.
    ended     All its workers have reported its end.
    void      A loss ends it (`loong.core.void_batches`); workers that are left may still be at it.
    left      No worker is at it any more.
    reported  The engine has seen its end, or the event of the loss that names it.

While it is sent or void, it starts: its instances begin it one by one. It has started when the last of them
has begun it, or one that had begun it is lost; at the latest with its first token.
"""

from asyncio import TimerHandle
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from loong.core.errors import InvalidEventError
from loong.core.events import ProducedToken
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.request import RequestId
from loong.executor.endpoints import WorkerId
from loong.messages.wire import BatchDone, BatchReport, StepDone


class Stage(Enum):
    """The stages above."""

    QUEUED = "queued"
    SENT = "sent"
    ENDED = "ended"
    VOID = "void"
    LEFT = "left"
    REPORTED = "reported"


_NEXT = {
    Stage.QUEUED: (Stage.SENT, Stage.VOID),
    Stage.SENT: (Stage.ENDED, Stage.VOID),
    Stage.ENDED: (Stage.REPORTED,),
    Stage.VOID: (Stage.LEFT,),
    Stage.LEFT: (Stage.REPORTED,),
    Stage.REPORTED: (),
}
UNFINISHED = (Stage.QUEUED, Stage.SENT)
"""The stages of a batch that can become void."""


@dataclass(slots=True, eq=False)
class SubmittedBatch:
    """A batch, and what is known of it.

    `workers` have yet to report its end, and the instances in `not_begun` its beginning. `reports` are those
    of its end so far, and `last_tokens` those of its last step. `tokens` are all of its end, once that is
    known. `behind` are the batches that its instances have to end before it. It was the one with number
    `ready_number` that could be sent. `timer` predicts its end.
    """

    instruction: RunBatch
    stage: Stage = Stage.QUEUED
    workers: set[WorkerId] = field(default_factory=set)
    not_begun: set[InstanceId] = field(default_factory=set)
    reports: list[BatchDone] = field(default_factory=list)
    last_tokens: list[ProducedToken] = field(default_factory=list)
    tokens: dict[RequestId, ProducedToken] | None = None
    behind: set[int] = field(default_factory=set)
    ready_number: int = 0
    timer: TimerHandle | None = None

    @property
    def batch_id(self) -> int:
        """Return its id."""
        return self.instruction.batch_id

    def move_to(self, stage: Stage) -> None:
        """Go on to another stage. Raises `InvalidEventError` if none of the arrows above leads there."""
        if stage not in _NEXT[self.stage]:
            raise InvalidEventError(
                f"batch {self.batch_id} is {self.stage.value}, so it cannot become {stage.value}"
            )
        self.stage = stage

    def send(self, workers: Iterable[WorkerId] = ()) -> None:
        """Record that it is sent to `workers`."""
        self.move_to(Stage.SENT)
        self.workers.update(workers)
        self.not_begun.update(instance_id for instance_id, _ in self.workers)

    def expects(self, report: BatchReport) -> bool:
        """Return whether a report of this batch can come."""
        if isinstance(report, StepDone):  # first, as most are
            return bool(self.workers)
        return (report.instance_id, report.tp_rank) in self.workers

    def has_begun_on(self, instance_id: InstanceId) -> bool:
        """Return whether it has not started, but an instance has begun it and may be at it."""
        is_at_it = any(worker_id[0] == instance_id for worker_id in self.workers)
        return bool(self.not_begun) and is_at_it and instance_id not in self.not_begun

    def starts_on(self, instance_id: InstanceId) -> bool:
        """Record that an instance has begun it. Return whether that is the last one."""
        if self.not_begun == {instance_id}:
            return True
        self.not_begun.discard(instance_id)
        return False

    def start(self) -> bool:
        """Record that it has started. Return whether it was sent, and had not started before."""
        is_new = bool(self.not_begun)
        self.not_begun.clear()
        return is_new

    def take_done(self, report: BatchDone) -> bool:
        """Take a report of its end. Return whether that was the last one.

        Raises `InvalidEventError` if two workers report different numbers of steps.
        """
        self.reports.append(report)
        first = self.reports[0]
        if report.num_steps != first.num_steps:
            raise InvalidEventError(
                f"batch {report.batch_id} took {first.num_steps} steps on rank {first.tp_rank} of instance "
                f"{first.instance_id}, but {report.num_steps} on rank {report.tp_rank} of instance "
                f"{report.instance_id}"
            )
        self.workers.remove((report.instance_id, report.tp_rank))
        if not self.workers:
            self.move_to(Stage.ENDED)
        return not self.workers

    @property
    def seconds(self) -> float | None:
        """Return its seconds by the clock of the workers, which is one machine's; None if none measured."""
        began_at = max(report.began_at for report in self.reports)
        return max(report.ended_at for report in self.reports) - began_at if began_at else None


class InFlight(dict[int, SubmittedBatch]):
    """The submitted batches by id, in their order. Those that were ever void are in `void_ids`."""

    def __init__(self) -> None:
        self.void_ids: set[int] = set()  # of forgotten ones, too: reports of them may come late

    def at(self, stage: Stage) -> list[SubmittedBatch]:
        """Return the batches in a stage."""
        return [batch for batch in self.values() if batch.stage is stage]

    def add(self, instruction: RunBatch) -> None:
        """Add a batch that is submitted now."""
        self[instruction.batch_id] = SubmittedBatch(instruction)

    def void(self, batch: SubmittedBatch) -> None:
        """Record that a batch is void."""
        batch.move_to(Stage.VOID)
        self.void_ids.add(batch.batch_id)

    def report(self, batch_id: int) -> None:
        """Forget a batch whose end the engine has seen: no later batch depends on it."""
        self.pop(batch_id).move_to(Stage.REPORTED)

    def forget_reported(self) -> None:
        """Forget the void batches that are reported: no later batch can be void because of them."""
        for batch in self.at(Stage.REPORTED):
            del self[batch.batch_id]
