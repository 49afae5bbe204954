"""The migrations that workers have not reported as done."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from loong.executor.endpoints import WorkerId
from loong.messages.wire import MigrationDone

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Migration:
    """A migration between the workers at its `ends`, of which those in `waiting` have yet to report it."""

    ends: frozenset[WorkerId]
    waiting: set[WorkerId]
    is_rolled_back: bool = False
    has_lost_end: bool = False


class Outstanding:
    """Migrations, each with the workers that have yet to report its end."""

    def __init__(self) -> None:
        self._migrations: dict[int, _Migration] = {}

    def begin_migration(self, migration_id: int, workers: Iterable[WorkerId]) -> None:
        """Record the workers at the two ends of a migration."""
        ends = frozenset(workers)
        self._migrations[migration_id] = _Migration(ends, set(ends))

    def has_migration(self, migration_id: int, worker_id: WorkerId) -> bool:
        """Return whether a worker is at an end of a migration that it has not reported."""
        migration = self._migrations.get(migration_id)
        return migration is not None and worker_id in migration.waiting

    def drop_workers(self, workers: Iterable[WorkerId]) -> list[int]:
        """Expect nothing more of lost workers. Return the migrations that no worker will report."""
        lost, over = frozenset(workers), list[int]()
        for migration_id, migration in tuple(self._migrations.items()):
            if lost.isdisjoint(migration.ends):
                continue
            migration.waiting -= lost
            migration.is_rolled_back = migration.has_lost_end = True
            if not migration.waiting:
                del self._migrations[migration_id]
                over.append(migration_id)
        return over

    @property
    def has_one_ended_moves(self) -> bool:
        """Return whether the other end of some lost instance's migration has yet to report."""
        return any(migration.has_lost_end for migration in self._migrations.values())

    def end_migration(self, report: MigrationDone) -> bool | None:
        """Return whether all ends committed a migration, if this was the last.

        None if others are to report.
        """
        migration = self._migrations[report.migration_id]
        migration.is_rolled_back |= not report.is_committed
        migration.waiting.remove((report.instance_id, report.tp_rank))
        if migration.waiting:
            return None
        del self._migrations[report.migration_id]
        if migration.is_rolled_back:
            logger.warning("migration %d was rolled back", report.migration_id)
        return not migration.is_rolled_back
