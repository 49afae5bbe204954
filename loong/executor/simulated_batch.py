"""A batch in flight in virtual time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from loong.core.cost.work import InstanceWork
from loong.core.events import ProducedToken
from loong.core.placement import InstanceId, Placement
from loong.core.plan import BatchPlan
from loong.core.request import FinishReason, RequestId
from loong.executor.lease_work import LeaseWork


class Sampled(NamedTuple):
    """A request that gets a token in each step: its tokens before, and at its end, for this reason."""

    request_id: RequestId
    had: int
    most: int
    reason: FinishReason


@dataclass(slots=True)
class SimulatedBatch:
    """A batch in flight, with the requests that get tokens.

    The first of these ends in step number `next_end`. All steps take `slowness` times as long as predicted.
    """

    plan: BatchPlan
    placements: Mapping[RequestId, Placement]
    sampled: list[Sampled]
    last_step: int
    slowness: float
    submitted_at: float
    num_steps_taken: int = 0
    step_ends_at: float = 0.0  # if nothing delays it
    next_end: int = field(init=False)
    work: LeaseWork = field(init=False)  # from its beginning on
    step_seconds: float = 0.0  # of the present step, from its beginning on
    read_shares: Mapping[InstanceId, float] = field(default_factory=dict)  # of others then, by holder

    def __post_init__(self) -> None:
        self._see_next_end()

    def sample(self) -> tuple[ProducedToken, ...]:
        """Return the tokens of the present step."""
        step = self.num_steps_taken
        if step < self.next_end:
            return tuple([ProducedToken(request_id, had + step) for request_id, had, _, _ in self.sampled])
        return tuple(
            ProducedToken(request_id, had + step, reason if had + step + 1 == most else None)
            for request_id, had, most, reason in self.sampled
        )

    def take_step(self) -> None:
        """Go on to the next step, without the requests that ended in this one."""
        step, self.num_steps_taken = self.num_steps_taken, self.num_steps_taken + 1
        self.work.take_step()
        if step < self.next_end:
            return
        for request_id, had, most, _ in self.sampled:
            if had + step + 1 == most:
                self.work.leave(request_id)
        self.sampled = [entry for entry in self.sampled if entry.had + step + 1 < entry.most]
        self._see_next_end()

    def read_share(self, holder_id: InstanceId, served_time: Callable[[InstanceWork], float]) -> float:
        """Return the share of time in which an instance reads for this batch, whose group is another.

        It reads slowly while it reads for others, too.
        """
        if not self.step_seconds or (work := self.work.step.holders.get(holder_id)) is None:
            return 0.0
        slowed = served_time(work) * (1 + self.read_shares.get(holder_id, 0.0))
        return min(1.0, slowed / self.step_seconds)

    def _see_next_end(self) -> None:
        self.next_end = min((most - had for _, had, most, _ in self.sampled), default=0) - 1
