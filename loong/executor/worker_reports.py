"""Reports of workers on their way to what expects them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import assert_never

from loong.core.placement import InstanceId
from loong.executor.batch_reports import BatchReports
from loong.executor.endpoints import WorkerId
from loong.executor.in_flight import InFlight
from loong.executor.losses import Losses
from loong.executor.membership import Membership
from loong.executor.outstanding import Outstanding
from loong.messages.stray_frames import StrayFrames
from loong.messages.wire import (
    BatchBegun,
    BatchDone,
    BatchFailed,
    CommandDone,
    Heartbeat,
    MigrationDone,
    PromptScored,
    SlotsLent,
    StepDone,
    WireError,
    WorkerFailed,
    WorkerReady,
    WorkerReport,
    decode_report,
)


@dataclass(eq=False, slots=True)
class WorkerReports:
    """Takes the frames of workers, and passes each report on. Frames that nothing expects are dropped.

    `join` is called when all workers of an instance are ready, and `end_migration` when all have reported a
    migration, with whether it is committed. Reports of what a loss has made void are expected while workers
    are `replaced`. `num_strays` are the frames that each worker dropped on its own sockets.
    """

    in_flight: InFlight
    outstanding: Outstanding
    members: Membership
    losses: Losses
    of_batches: BatchReports
    strays: StrayFrames
    join: Callable[[InstanceId], None]
    end_migration: Callable[[int, bool], None]
    take_lent: Callable[[SlotsLent], None]
    replaced: bool
    num_strays: dict[WorkerId, int] = field(default_factory=dict)

    def receive(self, frame: bytes) -> None:
        """Take one frame. Raises `InvalidEventError` if its report contradicts another's."""
        try:
            report = decode_report(frame)
        except WireError as error:
            self.strays.drop("a frame that is no report", str(error))
            return
        match report:
            case StepDone() | BatchBegun() | PromptScored() | BatchDone() | BatchFailed():  # most are
                batch = self.in_flight.get(report.batch_id)
                if batch is not None and batch.expects(report):
                    self.of_batches.take(batch, report)
                    return
                is_of_a_loss = report.batch_id in self.in_flight.void_ids
            case _ if self._is_expected(report):
                self._pass_on(report)
                return
            case _:
                is_known = report.instance_id < self.members.endpoints.num_instances
                is_of_a_loss = self.replaced and is_known
        if not is_of_a_loss:
            self.strays.drop(f"a {type(report).__name__} that is not expected", repr(report))

    def _is_expected(self, report: WorkerReport) -> bool:
        """Return whether a report is of a known worker, and of a migration that it has not reported."""
        worker_id = report.instance_id, report.tp_rank
        if isinstance(report, MigrationDone):
            return self.outstanding.has_migration(report.migration_id, worker_id)
        return worker_id in self.members.endpoints.commands

    def _pass_on(self, report: WorkerReport) -> None:
        match report:
            case WorkerReady():
                if self.members.take_ready(report):
                    self.join(report.instance_id)
            case Heartbeat():
                worker_id = report.instance_id, report.tp_rank
                self.members.heartbeats.hear(worker_id)
                self.num_strays[worker_id] = report.num_stray_frames
            case MigrationDone():
                if (is_committed := self.outstanding.end_migration(report)) is not None:
                    self.end_migration(report.migration_id, is_committed)
            case CommandDone():
                self.members.calls.take(report)
            case SlotsLent():
                self.take_lent(report)
            case WorkerFailed():
                self.losses.take(report)
            case _:
                assert_never(report)
