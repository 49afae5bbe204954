"""The work of a lease, step after step."""

from collections.abc import Mapping
from dataclasses import fields, replace

from loong.core.cost.work import InstanceWork, StepWork, step_work
from loong.core.placement import Placement
from loong.core.plan import BatchPlan
from loong.core.request import RequestId

_COUNTS = tuple(field.name for field in fields(InstanceWork))


class LeaseWork:
    """Counted once at the start; then every step adds a key for each request, at its master.

    `step` is the work of the present step, and changes in place.
    """

    def __init__(
        self, plan: BatchPlan, placements: Mapping[RequestId, Placement], *, starts_idle: bool = False
    ) -> None:
        self._plan, self._placements = plan, placements
        self._num_steps_taken = 0
        self.step: StepWork = replace(step_work(plan, placements), starts_idle=starts_idle)

    def take_step(self) -> None:
        """Go on to the next step."""
        if self.step.is_first:
            self.step = replace(self.step, is_first=False)
        self._num_steps_taken += 1
        for work in self.step.instances.values():
            work.num_decode_keys += work.num_blocks

    def leave(self, request_id: RequestId) -> None:
        """Go on without a request of the lease."""
        alone = replace(self._plan, queries=self._plan.blocks_of(request_id), writes=())
        for instance_id, less in step_work(alone, self._placements).instances.items():
            work = self.step.instances[instance_id]
            less.num_decode_keys += less.num_blocks * self._num_steps_taken
            for name in _COUNTS:
                setattr(work, name, getattr(work, name) - getattr(less, name))
        has_exchange = any(work.num_sent_queries for work in self.step.instances.values())
        self.step = replace(self.step, has_exchange=has_exchange)
