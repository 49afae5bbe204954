"""The steps before which leases end: set in one thread, and read by the thread that runs batches."""

from dataclasses import dataclass
from threading import Condition
from typing import Protocol

from loong.core.errors import ClusterError
from loong.core.instructions import RunBatch
from loong.fabric.waiting import wait_for


class LeaseTerm(Protocol):
    """The end of one lease, as one worker of its group received it."""

    def step(self) -> int:
        """Return the step before which it ends. Only the group's leader receives an earlier end."""

    def wait_for_room(self, num_steps: int) -> None:
        """Return once this worker has received the extension to `num_steps` steps, as its leader has.

        Earlier instructions, which may free slots for these steps, have then been carried out.
        """


class LeaseEnds:
    """The ends of all leases."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline  # seconds to wait for an extension that others have received
        self._num_steps: dict[int, int] = {}  # by batch: the most it may take
        self._stops: dict[int, int] = {}  # by batch
        self._extended = Condition()

    def extend(self, batch_id: int, num_steps: int) -> None:
        """Extend a lease to `num_steps` steps."""
        with self._extended:
            self._num_steps[batch_id] = num_steps
            self._extended.notify_all()

    def stop(self, batch_id: int, step: int) -> None:
        """Let a lease end before `step`, unless it is to end earlier. It is not extended after that."""
        self._stops[batch_id] = min(step, self._stops.get(batch_id, step))

    def of(self, command: RunBatch) -> LeaseTerm:
        """Return the end of one lease."""
        return _End(self, command.batch_id, command.plan.num_steps)

    def forget_up_to(self, batch_id: int) -> None:
        """Forget the ends of leases that are over: batches come in the order of their ids."""
        for ends in (self._num_steps, self._stops):
            for past_id in [i for i in list(ends) if i <= batch_id]:
                del ends[past_id]

    def step(self, batch_id: int, num_steps: int) -> int:
        """Return the step before which a lease that began with `num_steps` ends."""
        num_steps = self._num_steps.get(batch_id, num_steps)
        return min(num_steps, self._stops.get(batch_id, num_steps))

    def wait_for_room(self, batch_id: int, num_steps: int) -> None:
        """See LeaseTerm. Raises `ClusterError` if the extension does not arrive in time."""
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
