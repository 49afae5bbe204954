"""The scheduler's state in the log, to find out why a server stands still."""

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence

from loong.core.plan import KVMigration
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.processes.child_processes import signal_children

logger = logging.getLogger(__name__)

MAX_LINES = 40  # of each kind


class StateDump:
    """Logs the scheduler's state, and lets all other processes log their stacks, when asked.

    `snapshot` returns the state; None until there is one.
    """

    def __init__(self) -> None:
        self.snapshot: Callable[[], Snapshot] | None = None
        self._loop = asyncio.get_running_loop()

    def request(self) -> None:
        """Request a dump; callable from any thread."""
        signal_children(signal.SIGUSR1)
        self._loop.call_soon_threadsafe(self._log)

    def _log(self) -> None:
        text = "not there yet" if self.snapshot is None else described(self.snapshot())
        logger.warning("the scheduler's state: %s", text)


def described(snapshot: Snapshot) -> str:
    """Return counts, and a line for each of the first instances, batches, migrations and requests."""
    now, in_flight = snapshot.now, (*snapshot.ending, *snapshot.batches)
    migrations = (*snapshot.migrations, *snapshot.copies)
    num_waiting = len(snapshot.waiting) + len(snapshot.following)
    counts = (
        f"{num_waiting} waiting, {len(snapshot.running)} running; {len(in_flight)} batches and "
        f"{len(migrations)} migrations in flight; {now:.3f} s since the start"
    )
    instances = [
        f"instance {i.instance_id} ({i.kind.value}): KV {i.kv_used} of {i.kv_capacity} tokens"
        + (f", {i.kv_cached} more cached" if i.kv_cached else "")
        + ("" if i.batch_id is None else f", batch {i.batch_id}")
        for i in snapshot.instances
    ]
    parts = (
        instances,
        [_batch(batch, now, is_ending=batch in snapshot.ending) for batch in in_flight],
        [_migration(migration) for migration in migrations],
        [f"running: {_request(view, now)}" for view in snapshot.running],
        [f"waiting: {_request(view, now)}" for view in snapshot.waiting],
        [f"waiting for a prefix that another computes: {v.request_id}" for v in snapshot.following],
    )
    return "\n  ".join([counts, *(line for part in parts for line in _first(part))])


def _first(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], *([f"... and {rest} more"] if rest > 0 else [])]


def _batch(batch: RunningBatch, now: float, *, is_ending: bool) -> str:
    plan = batch.plan
    return (
        f"batch {batch.batch_id} on instances {', '.join(map(str, plan.group.instance_ids))}"
        f"{_holders(batch)}: "
        f"{len(plan.request_ids)} requests, {batch.num_steps_taken} of {batch.last_step} steps, "
        f"began {now - batch.started_at:.3f} s ago, last step {now - batch.stepped_at:.3f} s ago"
        + (", is ending" if is_ending else "")
    )


def _holders(batch: RunningBatch) -> str:
    return f", served by {', '.join(map(str, batch.holder_ids))}" if batch.holder_ids else ""


def _migration(migration: KVMigration) -> str:
    segment = migration.segment
    return (
        f"{'copy' if migration.keeps_source else 'migration'} of {len(segment.positions)} tokens "
        f"of {segment.owner_id}: "
        f"instance {segment.instance_id} to {migration.destination_id}"
    )


def _request(view: RequestView, now: float) -> str:
    held = ", ".join(f"{tokens} on {i}" for i, tokens in view.placement.tokens_by_instance().items())
    return (
        f"{view.request_id}, {view.num_prompt_tokens} tokens of prompt, {view.num_output_tokens} of at most "
        f"{view.max_tokens} of output, came {now - view.arrival_time:.3f} s ago, KV: {held or 'none'}"
        + ("" if view.batch_id is None else f", batch {view.batch_id}")
        + (", migrates" if view.is_migrating else "")
        + (", has ended" if view.has_ended else "")
    )
