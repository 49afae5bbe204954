"""The work of a lease, step after step."""

from collections.abc import Mapping
from dataclasses import fields, replace

from loong.core.cost.work import InstanceWork, StepWork, step_work
from loong.core.placement import Placement
from loong.core.plan import BatchPlan
from loong.core.request import RequestId

_COUNTS = tuple(field.name for field in fields(InstanceWork))


class LeaseWork:
    """The work of a lease, counted once; then every step adds a key for each request, at its master.

    `step` is the work of the present step, and changes in place.
    """

    def __init__(
        self, plan: BatchPlan, placements: Mapping[RequestId, Placement], *, starts_idle: bool = False
    ) -> None:
        self._plan, self._placements = plan, placements
        self._num_steps_taken = 0
        self._left = set[RequestId]()
        self._is_shared = any(placements[request_id].shared for request_id in plan.request_ids)
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
        self._left.add(request_id)
        if self._is_shared:
            self._count_again()
            return
        alone = replace(self._plan, queries=self._plan.blocks_of(request_id), writes=())
        alone_work = step_work(alone, self._placements)
        parts = [(self.step.instances[i], less) for i, less in alone_work.instances.items()]
        leader = alone_work.instances[self._plan.group.leader_id]
        for i, work in self.step.holders.items():
            laid_out = InstanceWork(leader.num_requests, leader.num_segments)
            parts.append((work, alone_work.holders.get(i, laid_out)))
        for work, less in parts:
            less.num_decode_keys += less.num_blocks * self._num_steps_taken
            for name in _COUNTS:
                setattr(work, name, getattr(work, name) - getattr(less, name))
        has_exchange = any(work.num_sent_queries for work in self.step.instances.values())
        holders = {i: work for i, work in self.step.holders.items() if work.num_attends}
        self.step = replace(self.step, has_exchange=has_exchange, holders=holders)

    def _count_again(self) -> None:
        """Count the present step of the requests that are left, as one may have read keys for others."""
        left = tuple(block for block in self._plan.queries if block.request_id not in self._left)
        if not left:
            return
        counted = step_work(
            replace(self._plan, queries=left, writes=()), self._placements, self.step.is_first
        )
        self.step = replace(counted, starts_idle=self.step.starts_idle)
        for work in self.step.instances.values():
            work.num_decode_keys += work.num_blocks * self._num_steps_taken
