"""What a group runs next: a lease for what decodes, or one step in which prompts and decodes share."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from loong.core.cost_model import CostModel
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.dispatch import Prefill, target_tpot
from loong.scheduler.group import Group
from loong.scheduler.step import Step, choose_masters
from loong.scheduler.survey import Survey

TPOT_MARGIN = 0.85  # of a TPOT target that a step may take
LEAST_TPOT = 0.5  # and never less, however late its decodes are
SPARED_SHARE = 0.5  # of the free slots that a long lease may take, so that the next prompt finds room
LEAST_CHUNK = 16  # tokens of some prompt in every step, whatever they take


@dataclass(frozen=True, slots=True)
class Scaling:
    """Makes batches of groups that are ready. Leases have `long_lease_steps` where room abounds."""

    survey: Survey
    cost_model: CostModel
    config: PolicyConfig
    long_lease_steps: int = 0

    step: ClassVar[type[Step]] = Step

    def batch(self, group: Group) -> BatchPlan | None:
        """What a group runs; None if it has no room for a step, or nothing to run."""
        decodes = [view for unit in group.units for view in unit.decodes]
        instance_ids = tuple(sorted(i for unit in group.units for i in unit.instance_ids))
        if group.prefills:
            return self._mixed(instance_ids, decodes, group.prefills)
        return self.lease(instance_ids, decodes)

    def lease(
        self,
        instance_ids: tuple[InstanceId, ...],
        decodes: Sequence[RequestView],
        seconds: float | None = None,
    ) -> BatchPlan | None:
        """Decode steps, as many as a lease has, as there is room for, and as fit into `seconds`."""
        if not decodes:
            return None
        num_steps = min(self._most_steps(instance_ids, decodes), max(v.num_remaining_tokens for v in decodes))
        while (step := self._decode_step(instance_ids, decodes, num_steps)) is None:
            num_steps //= 2
            if not num_steps:
                return None
        if seconds is not None:
            step.shorten(int(seconds / step.seconds))
        return step.plan() if step.num_steps else None

    def _most_steps(self, instance_ids: tuple[InstanceId, ...], decodes: Sequence[RequestView]) -> int:
        """Steps that a lease may have. Of several instances it is never long, so that they can part soon."""
        if len(instance_ids) > 1:
            return self.config.lease_steps
        num_spared = int(SPARED_SHARE * self.survey.free[instance_ids[0]])
        return max(self.config.lease_steps, min(self.long_lease_steps, num_spared // len(decodes)))

    def _decode_step(
        self, instance_ids: tuple[InstanceId, ...], decodes: Sequence[RequestView], num_steps: int
    ) -> Step | None:
        """A step of these decodes, with room for `num_steps`; None if that lacks."""
        free = {i: self.survey.free[i] for i in instance_ids}
        masters = choose_masters(decodes, free, num_steps)
        if masters is None:
            return None
        step = self.step(instance_ids, free, self.cost_model, self.config.max_num_batched_tokens, num_steps)
        for view, master_id in masters:
            step.add_decode(view, master_id)
        return step

    def _mixed(
        self,
        instance_ids: tuple[InstanceId, ...],
        decodes: Sequence[RequestView],
        prefills: Sequence[Prefill],
    ) -> BatchPlan | None:
        """One token of every decode, and chunks of prompts in order as long as decodes keep their TPOT."""
        step = self._decode_step(instance_ids, decodes, 1)
        if step is None:
            return None
        step.reckon()
        decode_seconds = step.seconds
        budget = self.budget(decodes)
        if self._is_hopeless(decodes, decode_seconds):
            budget = max(budget, 2 * decode_seconds)
        is_alone = not decodes and len(prefills) == 1
        if overdue := [p for p in prefills if p.is_late or p.is_missed]:
            oldest = min(overdue, key=lambda p: p.view.arrival_time)
            least = decode_seconds + self.config.late_share * (budget - decode_seconds)
            spared = budget - sum(p.work for p in prefills if p.rank < oldest.rank) / step.dop
            step.min_tokens = LEAST_CHUNK if self.config.late_share else 0  # else it might never go on
            if self._add(step, oldest, max(least, spared), is_alone):
                prefills = [p for p in prefills if p is not oldest]
            step.min_tokens = 0
        num_added = 0
        for prefill in prefills:
            num_added += self._add(step, prefill, budget, is_alone)
            if step.is_full(budget):
                break
        step.min_tokens = LEAST_CHUNK
        for prefill in prefills if not num_added else ():
            if self._add(step, prefill, budget, is_alone):
                break
        return None if step.is_empty else step.plan()

    def budget(self, decodes: Iterable[RequestView]) -> float:
        """Seconds that a step may take."""
        budget = self.config.max_step_time
        for view in decodes:
            tpot = target_tpot(view, self.config)
            seconds = TPOT_MARGIN * tpot
            if view.first_token_time is not None:
                slack = view.first_token_time + tpot * view.num_output_tokens - self.survey.snapshot.now
                seconds = max(LEAST_TPOT * tpot, min(seconds, slack))
            budget = min(budget, seconds)
        return budget

    def _is_hopeless(self, decodes: Iterable[RequestView], seconds: float) -> bool:
        """Whether decodes alone take all the time there is: to hold prompts up would not bring them in time.

        Prompts then have as much of a step as they have. Else a machine would do the less the slower it is.
        """
        return any(seconds > TPOT_MARGIN * target_tpot(view, self.config) for view in decodes)

    def _add(self, step: Step, prefill: Prefill, budget: float, is_alone: bool) -> int:
        """The next chunk of a prompt: on one instance if that will do, else over all of the group."""
        held = prefill.view.placement.instance_ids
        if step.dop > 1 and (is_alone or len(held) > 1):
            return step.add_striped(prefill.view, budget)
        fitting = {
            i: min(prefill.num_tokens, step.free[i], step.num_fitting(i, prefill.num_cached, budget))
            for i in held or step.instance_ids
        }
        best = max(fitting, key=lambda i: (fitting[i], step.free[i], -i))
        if step.dop > 1 and fitting[best] < prefill.num_tokens:
            return step.add_striped(prefill.view, budget)
        return step.add_whole(prefill.view, best, budget)
