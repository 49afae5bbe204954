"""The batches of a run on workers a second time: how far apart the times of the very same work are."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from loong.core.errors import ClusterError
from loong.core.events import BatchFinished, Event, InstanceLost, MigrationFinished
from loong.core.instructions import ExtendLease, Instruction, MoveKV, ReleaseKV, RunBatch, StopLease
from loong.executor.workers import WorkersExecutor


@dataclass(slots=True)
class Ends:
    """What has ended, in order, and what of it were batches: their seconds and steps.

    Seconds are from when the workers were told until all of them were done.
    """

    ids: list[int] = field(default_factory=list)
    seconds: dict[int, float] = field(default_factory=dict)
    num_steps: dict[int, int] = field(default_factory=dict)
    _reported_at: dict[int, float] = field(default_factory=dict)

    def begin(self, instructions: Iterable[Instruction], now: float) -> None:
        """These are told now."""
        self._reported_at.update(
            {reported.batch_id: now for reported in instructions if isinstance(reported, RunBatch)}
        )

    def take(self, event: Event) -> None:
        """Something may have ended. Raises `ClusterError` if it has failed."""
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
class Told:
    """Instructions given at a time, after so many batches and migrations had ended."""

    time: float
    num_ended: int
    instructions: tuple[Instruction, ...]


class NotingExecutor:
    """An `Executor` that notes what it was told and when, so that workers can be told again."""

    def __init__(self, executor: WorkersExecutor) -> None:
        self.reported: list[Told] = []
        self.ends = Ends()
        self._executor = executor

    async def next_events(self) -> Sequence[Event]:
        """All events there are."""
        events = await self._executor.next_events()
        for event in events:
            self.ends.take(event)
        return events

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Note instructions, and hand them on."""
        if reported := tuple(instructions):
            now = self._executor.now
            self.ends.begin(reported, now)
            self.reported.append(Told(now, len(self.ends.ids), reported))
            self._executor.submit(reported)


async def repeated(noted: NotingExecutor, executor: WorkersExecutor) -> Mapping[int, float]:
    """Tell idle workers without KV the same again; returns the seconds of each batch, by its first id.

    Nothing is told earlier than it was, nor before what had ended by then. Leases have as many steps as they
    came to, so nobody extends or stops them.
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
        for reported in (*noted.reported, Told(0.0, len(noted.ends.ids), ())):
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
    """The same under later ids, without what was said about leases while they ran."""
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
