"""The void work of lost instances, until the other workers have left it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeAlias

from loong.core.events import InstanceLost
from loong.core.instance import ElasticInstance, InstanceKind, home_instance_id
from loong.core.instructions import Instruction, RunBatch
from loong.core.placement import InstanceId
from loong.core.void_batches import BatchParts, is_void, void_batches

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
    """

    start: Callable[[InstanceId, float], None]
    end: Callable[[InstanceId], None]
    retire: Callable[[InstanceId], None]
    instances: tuple[ElasticInstance, ...]
    processes_of: Callable[[InstanceId], Sequence[SendSignal]]
    failures: Failures
    trouble: Callable[[], str] = str

    def kept_by(self, instance_id: InstanceId) -> tuple[ElasticInstance, ...]:
        """Return an instance and the host tier that its processes keep, if there is one."""
        num_full = sum(instance.kind is InstanceKind.FULL for instance in self.instances)
        return tuple(i for i in self.instances if home_instance_id(i.instance_id, num_full) == instance_id)


class Recovery:
    """The batches in flight that fail with a lost instance, and the losses to be reported.

    A batch is void if a lost instance has a part in it, or if a worker has left it before its end. Later
    batches of the same requests are void too. A loss becomes an event only when all workers that are left
    have left all void batches: then nothing writes into slots that are released because of it.
    """

    def __init__(self, has_left: Callable[[int], bool]) -> None:
        """`has_left` returns whether all workers that are left are done with a void batch."""
        self._has_left = has_left
        self._in_flight: dict[int, RunBatch] = {}  # in the order of their ids
        self._void: set[int] = set()  # of these
        self._unreported: set[int] = set()  # void batches that are left, for the next event to name
        self._closed: dict[int, RunBatch] = {}  # left, but not all losses so far are seen by the engine
        self._losses: dict[InstanceId, str] = {}  # reasons of losses that are no event yet
        self._gone: set[InstanceId] = set()  # instances whose loss the engine has not seen
        self._ever_void: set[int] = set()

    def accepts(self, instruction: Instruction) -> bool:
        """Take a new instruction. Return whether it can be carried out; a batch that cannot is void."""
        if isinstance(instruction, RunBatch):
            self._in_flight[instruction.batch_id] = instruction
            if self._gone or self._void:
                self._spread()
        return not self.refuses(instruction)

    def refuses(self, instruction: Instruction) -> bool:
        """Return whether an instruction can no longer be carried out."""
        return is_void(instruction, self._gone, self._ever_void)

    def end(self, batch_id: int) -> None:
        """Forget a batch that has ended."""
        self._in_flight.pop(batch_id, None)

    def is_void(self, batch_id: int) -> bool:
        """Return whether a batch is void, or was."""
        return batch_id in self._ever_void

    def fail(self, batch_id: int) -> None:
        """Note that a worker has left a batch before its end."""
        self._void.add(batch_id)
        self._spread()

    def lose(self, instance_id: InstanceId, reason: str) -> None:
        """Note that an instance is lost."""
        self._losses[instance_id] = reason
        self._gone.add(instance_id)
        self._spread()

    def settle(self) -> tuple[list[int], dict[InstanceId, str]]:
        """Return the void batches that are over and the losses that are events now; none while one is not."""
        if not self._losses or not all(map(self._has_left, self._void)):
            return [], {}
        losses, self._losses = self._losses, {}
        return self._close(self._void), losses

    def reported(self, event: InstanceLost) -> InstanceLost:
        """Return the event as the engine is to see it now, with all batches that are void."""
        self._gone.discard(event.instance_id)
        if not self._losses:  # nothing else reports what was refused since the loss
            self._close({batch_id for batch_id in self._void if self._has_left(batch_id)})
        void, self._unreported = self._unreported, set()
        if not self._void and not self._gone:
            self._closed.clear()
        return replace(event, void_batch_ids=tuple(sorted(void)))

    def _close(self, void: set[int]) -> list[int]:
        """Take void batches out of flight, for the next event to name. Return them."""
        for batch_id in void:
            self._closed[batch_id] = self._in_flight.pop(batch_id)
        self._unreported |= void
        self._void = self._void - void
        return sorted(void)

    def _spread(self) -> None:
        """Make void what depends on a lost instance, or on a void batch before it."""
        batches = sorted(map(BatchParts.of, (*self._closed.values(), *self._in_flight.values())))
        void = void_batches(batches, self._gone, self._void | self._closed.keys())
        self._void.update(batch_id for batch_id in void if batch_id in self._in_flight)
        self._ever_void |= self._void
