"""The work that workers have not reported as done."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from loong.core.errors import InvalidEventError
from loong.core.events import ProducedToken
from loong.core.placement import InstanceId
from loong.executor.endpoints import WorkerId
from loong.messages.wire import BatchBegun, BatchDone, MigrationDone, StepDone

logger = logging.getLogger(__name__)


class EndedBatch(NamedTuple):
    """The common report of the workers of a batch. They may not have measured its seconds."""

    num_steps: int
    last_tokens: Sequence[ProducedToken]
    seconds: float | None


class Outstanding:
    """Batches and migrations, each with the workers that have yet to report its end."""

    def __init__(self) -> None:
        self._batches: dict[int, set[WorkerId]] = {}
        self._migrations: dict[int, set[WorkerId]] = {}
        self._ends: dict[int, frozenset[WorkerId]] = {}  # of these, reported or not
        self._done: defaultdict[int, list[BatchDone]] = defaultdict(list)  # by batch; all must agree
        self._last_tokens: defaultdict[int, list[ProducedToken]] = defaultdict(list)  # by batch
        self._rolled_back: set[int] = set()
        self._one_ended: set[int] = set()  # migrations of which one end is lost
        self._not_begun: dict[int, set[InstanceId]] = {}  # by batch that has not started

    def begin_batch(self, batch_id: int, workers: Iterable[WorkerId]) -> None:
        """Record the workers that are to run a batch."""
        self._batches[batch_id] = set(workers)
        self._not_begun[batch_id] = {instance_id for instance_id, _ in self._batches[batch_id]}

    def begin_migration(self, migration_id: int, workers: Iterable[WorkerId]) -> None:
        """Record the workers at the two ends of a migration."""
        self._migrations[migration_id] = set(workers)
        self._ends[migration_id] = frozenset(workers)

    def runs(self, batch_id: int) -> bool:
        """Return whether a batch has workers that have not reported its end."""
        return batch_id in self._batches

    def has_batch(self, batch_id: int, worker_id: WorkerId) -> bool:
        """Return whether a worker runs a batch, or is to."""
        return worker_id in self._batches.get(batch_id, ())

    def has_migration(self, migration_id: int, worker_id: WorkerId) -> bool:
        """Return whether a worker is at an end of a migration that it has not reported."""
        return worker_id in self._migrations.get(migration_id, ())

    def is_last_to_begin(self, report: BatchBegun | BatchDone) -> bool:
        """Return whether all instances of a batch have begun it with this one."""
        instance_ids = self._not_begun.get(report.batch_id, set())
        is_awaited = report.instance_id in instance_ids
        instance_ids.discard(report.instance_id)
        return is_awaited and not instance_ids

    def begun_by(self, instance_id: InstanceId) -> list[int]:
        """Return the batches that an instance has begun and others have yet to begin."""
        return [
            batch_id
            for batch_id, not_begun in self._not_begun.items()
            if instance_id not in not_begun
            and any(w[0] == instance_id for w in self._batches.get(batch_id, ()))
        ]

    def start(self, batch_id: int) -> bool:
        """Mark a batch as started, even before all reports. Return whether it was not started before."""
        return self._not_begun.pop(batch_id, None) is not None

    def take_tokens(self, report: StepDone) -> None:
        """Keep the tokens of a batch's last step."""
        if report.is_last:
            self._last_tokens[report.batch_id] += report.tokens

    def end_batch(self, report: BatchDone) -> EndedBatch | None:
        """Return the end of a batch if this is its last report; None if other workers have yet to report.

        Raises `InvalidEventError` if two workers report different numbers of steps.
        """
        reports = self._done[report.batch_id]
        reports.append(report)
        first = reports[0]
        if report.num_steps != first.num_steps:
            raise InvalidEventError(
                f"batch {report.batch_id} took {first.num_steps} steps on rank {first.tp_rank} of instance "
                f"{first.instance_id}, but {report.num_steps} on rank {report.tp_rank} of instance "
                f"{report.instance_id}"
            )
        if not _is_last(self._batches, report.batch_id, (report.instance_id, report.tp_rank)):
            return None
        tokens = self._last_tokens.pop(report.batch_id, [])
        return EndedBatch(report.num_steps, tokens, _measured_seconds(self._done.pop(report.batch_id)))

    def leave_batch(self, batch_id: int, worker_id: WorkerId) -> None:
        """Record that a worker is done with a void batch."""
        self._batches[batch_id].discard(worker_id)

    def is_left(self, batch_id: int) -> bool:
        """Return whether all workers are done with a void batch, or it was never sent to them."""
        return not self._batches.get(batch_id)

    def drop_batch(self, batch_id: int) -> None:
        """Forget a void batch."""
        for by_batch in (self._batches, self._done, self._not_begun, self._last_tokens):
            by_batch.pop(batch_id, None)

    def drop_workers(self, workers: Iterable[WorkerId]) -> list[int]:
        """Expect nothing more of lost workers. Return the migrations that no worker will report."""
        lost = frozenset(workers)
        for waiting in self._batches.values():
            waiting -= lost
        over = []
        for migration_id, waiting in tuple(self._migrations.items()):
            if lost.isdisjoint(self._ends[migration_id]):
                continue
            waiting -= lost
            self._rolled_back.add(migration_id)
            self._one_ended.add(migration_id)
            if not waiting:
                del self._migrations[migration_id]
                self._close_migration(migration_id)
                over.append(migration_id)
        return over

    def _close_migration(self, migration_id: int) -> None:
        del self._ends[migration_id]
        self._one_ended.discard(migration_id)
        self._rolled_back.discard(migration_id)

    @property
    def has_one_ended_moves(self) -> bool:
        """Return whether the other end of some lost instance's migration has yet to report."""
        return bool(self._one_ended)

    def end_migration(self, report: MigrationDone) -> bool | None:
        """Return whether all ends committed a migration, if this was the last.

        None if others are to report.
        """
        migration_id = report.migration_id
        if not report.is_committed:
            self._rolled_back.add(migration_id)
        if not _is_last(self._migrations, migration_id, (report.instance_id, report.tp_rank)):
            return None
        is_committed = migration_id not in self._rolled_back
        self._close_migration(migration_id)
        if not is_committed:
            logger.warning("migration %d was rolled back", migration_id)
        return is_committed


def _is_last(waiting_for: dict[int, set[WorkerId]], number: int, worker_id: WorkerId) -> bool:
    workers = waiting_for[number]
    workers.remove(worker_id)
    if workers:
        return False
    del waiting_for[number]
    return True


def _measured_seconds(reports: Sequence[BatchDone]) -> float | None:
    """Return the seconds of a batch by the clock of the workers, which is one machine's.

    None if none measured.
    """
    began_at = max(report.began_at for report in reports)
    return max(report.ended_at for report in reports) - began_at if began_at else None
