"""The batches of a run on workers a second time: the variation in times of the same work."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loong.core.errors import ClusterError
from loong.core.events import BatchFinished, Event, InstanceLost, MigrationFinished
from loong.core.instructions import ExtendLease, Instruction, MoveKV, ReleaseKV, RunBatch, StopLease
from loong.executor.workers import WorkersExecutor


@dataclass(slots=True)
class Ends:
    """The batches and migrations that have ended, in order, and the seconds and steps of batches.

    Seconds are from the submission until all workers were done.
    """

    ids: list[int] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    num_steps: dict[int, int] = field(default_factory=dict)
    _reported_at: dict[int, float] = field(default_factory=dict)

    def begin(self, instructions: Iterable[Instruction], now: float) -> None:
        """Record instructions that are sent now."""
        self._reported_at.update(
            {reported.batch_id: now for reported in instructions if isinstance(reported, RunBatch)}
        )

    def take(self, event: Event) -> None:
        """Record what an event ends. Raises `ClusterError` if it has failed."""
        match event:
            case BatchFinished():
                self.ids.append(event.batch_id)
                self.seconds[event.batch_id] = event.time - self._reported_at.pop(event.batch_id)
                self.num_steps[event.batch_id] = event.num_steps
            case MigrationFinished(is_committed=True):
                self.ids.append(event.migration_id)
            case MigrationFinished() | InstanceLost():
                raise ClusterError(f"batches cannot be repeated: {event}")
            case _:
                pass


@dataclass(frozen=True, slots=True)
class TimedInstructions:
    """Instructions given at a time, after a number of batches and migrations had ended."""

    time: float
    num_ended: int
    instructions: tuple[Instruction, ...]


class NotingExecutor:
    """An `Executor` that records its instructions with their times, so that they can be repeated."""

    def __init__(self, executor: WorkersExecutor) -> None:
        self.reported: list[TimedInstructions] = []
        self.ends = Ends()
        self._executor = executor

    async def next_events(self) -> Sequence[Event]:
        """Return all events so far."""
        events = await self._executor.next_events()
        for event in events:
            self.ends.take(event)
        return events

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Record instructions, and pass them on."""
        if reported := tuple(instructions):
            now = self._executor.now
            self.ends.begin(reported, now)
            self.reported.append(TimedInstructions(now, len(self.ends.ids), reported))
            self._executor.submit(reported)


async def repeated(noted: NotingExecutor, executor: WorkersExecutor) -> Mapping[int, float]:
    """Send the same instructions to idle workers without KV.

    Return the seconds of each batch by its first id.

    No instruction is sent earlier than before, or before the batches that had ended by then. Leases have the
    steps that they took, so none is extended or stopped.
    """
    ends, has_ended = Ends(), asyncio.Event()
    first_id = max(noted.ends.ids) + 1  # workers take batches in the order of their ids

    async def watch() -> None:
        while events := await executor.next_events():
            for event in events:
                ends.take(event)
            has_ended.set()

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        offset = executor.now - noted.reported[0].time
        for reported in (*noted.reported, TimedInstructions(0.0, len(noted.ends.ids), ())):
            needed = {first_id + earlier_id for earlier_id in noted.ends.ids[: reported.num_ended]}
            while not needed.issubset(ends.ids):
                has_ended.clear()
                await has_ended.wait()
            await asyncio.sleep(reported.time + offset - executor.now)
            instructions = list(_again(reported.instructions, noted.ends.num_steps, first_id))
            ends.begin(instructions, executor.now)
            executor.submit(instructions)
        watching.cancel()
    return {batch_id - first_id: seconds for batch_id, seconds in ends.seconds.items()}


def _again(
    instructions: Iterable[Instruction], num_steps: Mapping[int, int], first_id: int
) -> Iterable[Instruction]:
    """Return the same instructions under later ids, without those about running leases."""
    for reported in instructions:
        match reported:
            case RunBatch():
                same = (
                    reported
                    if reported.plan.num_steps == 1
                    else reported.lengthened(num_steps[reported.batch_id])
                )
                yield replace(same, batch_id=first_id + reported.batch_id)
            case MoveKV():
                yield replace(reported, migration_id=first_id + reported.migration_id)
            case ReleaseKV():
                yield reported
            case ExtendLease() | StopLease():
                pass
