"""Before which steps leases end: told by the engine to one thread, asked for by the one that runs batches."""

from dataclasses import dataclass
from threading import Condition
from typing import Protocol

from loong.core.errors import ClusterError
from loong.core.instructions import RunBatch
from loong.fabric.waiting import wait_for


class LeaseTerm(Protocol):
    """The end of one lease, as one worker of its group was told."""

    def step(self) -> int:
        """Before which step it ends. Only the group's leader is told if that is earlier than before."""

    def wait_for_room(self, num_steps: int) -> None:
        """Return once this worker was told that the lease may have so many steps, as its leader was.

        What it was told before, to free slots that they may need, has then been done.
        """


class LeaseEnds:
    """The ends of all leases."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline  # seconds to wait for what others were told
        self._num_steps: dict[int, int] = {}  # by batch: the most it may take
        self._stops: dict[int, int] = {}  # by batch
        self._extended = Condition()

    def extend(self, batch_id: int, num_steps: int) -> None:
        """Let a lease go on up to so many steps."""
        with self._extended:
            self._num_steps[batch_id] = num_steps
            self._extended.notify_all()

    def stop(self, batch_id: int, step: int) -> None:
        """Let a lease end before `step`, unless it is to end earlier. It is not extended after that."""
        self._stops[batch_id] = min(step, self._stops.get(batch_id, step))

    def of(self, command: RunBatch) -> LeaseTerm:
        """The end of one lease."""
        return _End(self, command.batch_id, command.plan.num_steps)

    def forget_up_to(self, batch_id: int) -> None:
        """Forget the ends of leases that are over: batches come in the order of their ids."""
        for ends in (self._num_steps, self._stops):
            for past_id in [i for i in list(ends) if i <= batch_id]:
                del ends[past_id]

    def step(self, batch_id: int, num_steps: int) -> int:
        """Before which step a lease that began with `num_steps` ends."""
        num_steps = self._num_steps.get(batch_id, num_steps)
        return min(num_steps, self._stops.get(batch_id, num_steps))

    def wait_for_room(self, batch_id: int, num_steps: int) -> None:
        """See LeaseTerm. Raises `ClusterError` if nobody says so in time."""
        with self._extended:
            is_extended = wait_for(
                self._extended, lambda: self._num_steps.get(batch_id, 0) >= num_steps, self._deadline
            )
        if not is_extended:
            raise ClusterError(
                f"the lease of batch {batch_id} goes on up to step {num_steps} elsewhere, "
                f"but here nothing was heard of that within {self._deadline:g} s"
            )


@dataclass(frozen=True, slots=True)
class _End:
    """See LeaseTerm."""

    ends: LeaseEnds
    batch_id: int
    num_steps: int  # at its beginning

    def step(self) -> int:
        return self.ends.step(self.batch_id, self.num_steps)

    def wait_for_room(self, num_steps: int) -> None:
        if num_steps > self.num_steps:
            self.ends.wait_for_room(self.batch_id, num_steps)
