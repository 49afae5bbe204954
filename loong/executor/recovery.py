"""The void work of lost instances, until the other workers have left it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TypeAlias

from loong.core.instance import ElasticInstance
from loong.core.instructions import Instruction, RunBatch
from loong.core.placement import InstanceId
from loong.core.void_batches import BatchParts, is_void, void_batches
from loong.executor.in_flight import UNFINISHED, InFlight, Stage, SubmittedBatch
from loong.executor.room_workers import RoomWorkers

SendSignal: TypeAlias = Callable[[int], None]
"""Sends a signal to one process, as long as it has not ended."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The times before an instance starts again, in seconds: none, then `first`, doubled up to `longest`.

    Failures count in a row: an instance that served for `steady` seconds before a failure begins anew. After
    `max_failures` in a row it is quarantined: it does not start again.
    """

    first: float = 0.5
    longest: float = 60.0
    steady: float = 10.0
    max_failures: int = 8


class Failures:
    """The failures of all instances, in a row. `clock` returns seconds."""

    def __init__(self, backoff: Backoff, clock: Callable[[], float] = monotonic) -> None:
        self._backoff, self._clock = backoff, clock
        self._num_in_row: Counter[InstanceId] = Counter()
        self._joined_at: dict[InstanceId, float] = {}  # since the last failure

    def join(self, instance_id: InstanceId) -> None:
        """Note that an instance serves from now on."""
        self._joined_at[instance_id] = self._clock()

    def forget(self, instance_id: InstanceId) -> None:
        """Let the next failure of an instance be its first."""
        self._joined_at.pop(instance_id, None)
        self._num_in_row.pop(instance_id, None)

    def fail(self, instance_id: InstanceId) -> float | None:
        """Note a failure of a start or a service. Return the delay of the next start, None: quarantine."""
        backoff, joined_at = self._backoff, self._joined_at.pop(instance_id, None)
        if joined_at is not None and self._clock() - joined_at > backoff.steady:
            self.forget(instance_id)
        self._num_in_row[instance_id] += 1
        match self._num_in_row[instance_id]:
            case number if number >= backoff.max_failures:
                return None
            case 1:
                return 0.0
            case number:
                return min(backoff.longest, backoff.first * 2.0 ** (number - 2))


@dataclass(frozen=True, slots=True)
class Restarts:
    """The way in which instances come and go while the cluster serves.

    `start` starts the processes of one, some seconds after those that it had. They start only when no batch
    in flight has the instance as a member: a batch never meets two processes of one worker. `end` ends all
    processes of an instance at once. `retire` waits until those that were asked to end have done so, and
    starts none again. `instances` are all that can join, empty. `processes_of` returns how the present
    processes of an instance are sent signals. `failures` decide after how long one starts again; `retire`
    forgets them. `trouble` returns the reason why none can start again, an empty string if there is none.
    `room` starts workers in room for other engines, if that can be.
    """

    start: Callable[[InstanceId, float], None]
    end: Callable[[InstanceId], None]
    retire: Callable[[InstanceId], None]
    instances: tuple[ElasticInstance, ...]
    processes_of: Callable[[InstanceId], Sequence[SendSignal]]
    failures: Failures
    trouble: Callable[[], str] = str
    room: RoomWorkers | None = None

    def kept_by(self, instance_id: InstanceId) -> tuple[ElasticInstance, ...]:
        """Return an instance and the host tier that its processes keep, if there is one."""
        return tuple(i for i in self.instances if instance_id in (i.instance_id, i.tier_of))


class Recovery:
    """The losses that are to be reported, and the batches in flight that fail with them.

    A batch is void if a lost instance has a part in it, or if a worker has left it before its end. Later
    batches of the same requests are void too. A loss becomes an event only when all workers that are left
    have left all void batches: then nothing writes into slots that are released because of it.
    """

    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight
        self._losses: dict[InstanceId, str] = {}  # reasons of losses that are no event yet
        self._gone: set[InstanceId] = set()  # instances whose loss the engine has not seen

    def accepts(self, instruction: Instruction) -> bool:
        """Take a new instruction. Return whether it can be carried out; a batch that cannot is void."""
        if isinstance(instruction, RunBatch):
            self._in_flight.add(instruction)
            if self._gone or self._in_flight.at(Stage.VOID):
                self._spread()
        return not self.refuses(instruction)

    def refuses(self, instruction: Instruction) -> bool:
        """Return whether an instruction can no longer be carried out."""
        return is_void(instruction, self._gone, self._in_flight.void_ids)

    def fail(self, batch: SubmittedBatch) -> None:
        """Note that a worker has left a batch before its end."""
        if batch.stage is not Stage.VOID:
            self._in_flight.void(batch)
            self._spread()

    def lose(self, instance_id: InstanceId, reason: str) -> None:
        """Note that an instance is lost."""
        self._losses[instance_id] = reason
        self._gone.add(instance_id)
        self._spread()

    def settle(self) -> tuple[list[SubmittedBatch], dict[InstanceId, str]]:
        """Return the void batches that all have left, and the losses that are events now.

        There are none while a worker is at any void batch.
        """
        void = self._in_flight.at(Stage.VOID)
        if not self._losses or any(batch.workers for batch in void):
            return [], {}
        losses, self._losses = self._losses, {}
        return _left(void), losses

    def see(self, instance_id: InstanceId) -> list[SubmittedBatch]:
        """Note that the engine is to see a loss now. Return the void batches that are left since then."""
        self._gone.discard(instance_id)
        if self._losses:  # which report what is refused
            return []
        return _left([batch for batch in self._in_flight.at(Stage.VOID) if not batch.workers])

    def report(self) -> tuple[int, ...]:
        """Return the void batches that the next event is to name."""
        left = self._in_flight.at(Stage.LEFT)
        for batch in left:
            batch.move_to(Stage.REPORTED)
        if not self._gone and not self._in_flight.at(Stage.VOID):
            self._in_flight.forget_reported()
        return tuple(batch.batch_id for batch in left)

    def _spread(self) -> None:
        """Make void what depends on a lost instance, or on a void batch before it."""
        parts = [BatchParts.of(b.instruction) for b in self._in_flight.values() if b.stage is not Stage.ENDED]
        for batch_id in void_batches(parts, self._gone, self._in_flight.void_ids):
            if (batch := self._in_flight[batch_id]).stage in UNFINISHED:
                self._in_flight.void(batch)


def _left(batches: list[SubmittedBatch]) -> list[SubmittedBatch]:
    for batch in batches:
        batch.move_to(Stage.LEFT)
    return batches
