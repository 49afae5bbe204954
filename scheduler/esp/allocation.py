"""Allocation: the instances that compute each prompt, and batching by the exact program.

Every instance set begins as a group of its own that goes on with the prompts begun on it. A long prompt then
takes the groups that together would finish it first. Short prompts are batched over the remaining groups by
the program of `batching_program.py`. Groups that share a prompt become one.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar

from loong.core.cost.cost_model import CostModel
from loong.core.request import RequestId
from loong.scheduler.common.batching_program import Demand, Offer, solve
from loong.scheduler.common.planning_view import InstanceSet, PlanningView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.admission import PrefillCandidate
from loong.scheduler.esp.group import Group
from loong.scheduler.esp.group_queue import GroupQueue
from loong.scheduler.tuning import LONG_PROMPT_STEPS, USABLE_SPEED_SHARE

MAX_DEMANDS, MAX_OFFERS = 32, 16  # the most that one call of the program takes; the rest is placed in order


@dataclass(slots=True)
class Allocation:
    """Builds groups of instances for prompts."""

    planning_view: PlanningView
    cost_model: CostModel
    config: PolicyConfig
    groups: list[Group] = field(default_factory=list)
    least_long: float = field(init=False)  # seconds of work: a longer prompt keeps an instance for many steps

    grows: ClassVar[bool] = True  # whether prompts may take more instances at chunk boundaries

    def __post_init__(self) -> None:
        self.least_long = LONG_PROMPT_STEPS * self.config.step_time

    def allocate(self, order: Sequence[PrefillCandidate]) -> list[Group]:
        """Return a group for every instance set that may be of use, or for several that share a prompt.

        A prompt that fits nowhere is left out.
        """
        shorts = [p for p in order if p.work <= self.least_long and not p.is_begun]
        longs = [p for p in order if p.work > self.least_long and (self.grows or not p.is_begun)]
        self.groups = self._own_groups(order, self._useful_sets(shorts, longs))
        num_kept = self.planning_view.num_instances // 4 if longs and self._expects_shorts() else 0
        num_urgent = sum(not prefill.is_deferred for prefill in order)
        share = (self.planning_view.num_instances - num_kept) // max(1, num_urgent)
        for prefill in longs:
            self._spread(prefill, max(1, share))
        self._place_shorts(shorts)
        self._batch({p.view.request_id for p in shorts})
        return self.groups

    def _expects_shorts(self) -> bool:
        """Return whether short prompts came lately, and so may come again."""
        terms, lengths = self.cost_model.prefill_terms(1), self.planning_view.snapshot.recent_prompt_lengths
        return any(terms.time(n, 0, n * n) <= self.least_long for n in lengths)

    def _useful_sets(
        self, shorts: Sequence[PrefillCandidate], longs: Sequence[PrefillCandidate]
    ) -> Iterable[InstanceSet]:
        """Return the sets with requests not in flight, and others that prompts or decodes may need.

        A short prompt waits for no batch while there is an idle instance for it.
        """
        if longs or not self._fit_idle(shorts):
            return self.planning_view.instance_sets
        num_wanted = len(self.planning_view.occupied) + (len(shorts) + MAX_OFFERS if shorts else 0)
        idle = (
            InstanceSet.of_idle(i, self.planning_view.snapshot) for i in self.planning_view.idle[:num_wanted]
        )
        return (*self.planning_view.occupied, *idle)

    def _fit_idle(self, shorts: Sequence[PrefillCandidate]) -> bool:
        """Return whether each prompt could have an idle instance, those with most room first."""
        if not shorts:
            return True
        idle = self.planning_view.idle
        return len(shorts) <= len(idle) and (
            self.planning_view.free[idle[len(shorts) - 1]] >= max(map(self.demand, shorts))
        )

    def _own_groups(
        self, order: Iterable[PrefillCandidate], instance_sets: Iterable[InstanceSet]
    ) -> list[Group]:
        begun_by_id = {p.view.request_id: p for p in order if p.is_begun}
        free_of = self.planning_view.free.__getitem__
        groups = []
        for instance_set in instance_sets:
            begun: list[PrefillCandidate] = []
            spare = sum(map(free_of, instance_set.instance_ids))
            if instance_set.prefills:
                ids = (view.request_id for view in instance_set.prefills)
                begun = sorted((begun_by_id[i] for i in ids if i in begun_by_id), key=attrgetter("rank"))
                spare -= sum(p.num_tokens for p in begun)
            if instance_set.decodes:
                spare -= sum(
                    min(self.config.lease_steps, v.num_remaining_tokens) for v in instance_set.decodes
                )
            groups.append(Group([instance_set], begun, spare))
        return groups

    def _spread(self, prefill: PrefillCandidate, max_dop: int) -> None:
        """Give a prompt the groups that together would finish it first, including its own if it has one.

        Together they have at most `max_dop` instances, which doubles while the prompt would be late. A single
        group may have more.
        """
        waits = {id(group): group.wait_of(prefill) for group in self.groups}
        own = [group for group in self.groups if any(p is prefill for p in group.prefills)]
        others = [g for g in self.groups if not own or not g.prefills]
        by_wait = sorted(others, key=lambda g: (waits[id(g)], -g.spare))
        demand = 0 if own else self.demand(prefill)
        for limit in _doubled(max_dop, self.planning_view.num_instances):
            chosen, least = own, float("inf")
            for base in own or by_wait[:MAX_OFFERS]:
                together, dop, spare, wait = [base], base.dop, base.spare, waits[id(base)]
                for group in [None, *by_wait]:
                    if group is not None:
                        if group is base or dop + group.dop > limit:
                            continue
                        together.append(group)
                        dop, spare = dop + group.dop, spare + group.spare
                        wait = max(wait, waits[id(group)])
                    seconds = wait + prefill.work / dop
                    if spare >= demand and seconds < least:
                        chosen, least = list(together), seconds
            if chosen and self.planning_view.snapshot.now + least / USABLE_SPEED_SHARE <= prefill.deadline:
                break
        if chosen != own:
            self._place([prefill], chosen)

    def _place_shorts(self, shorts: Sequence[PrefillCandidate]) -> None:
        """Give each prompt, most urgent first, the group that would finish it first.

        Several if none can alone.
        """
        full = self.config.step_time
        soonest = GroupQueue(self.groups, self.least_long, full)
        least_refused = float("inf")
        for prefill in shorts:
            demand = self.demand(prefill)
            if demand >= least_refused:
                continue
            if group := soonest.group_for(prefill, demand):
                group.add(prefill, demand)
                continue
            num_groups = len(self.groups)
            self._spread(prefill, self.planning_view.num_instances)
            if len(self.groups) < num_groups:
                soonest = GroupQueue(self.groups, self.least_long, full)
            else:
                least_refused = demand  # free slots only become fewer

    def _batch(self, fresh_ids: Set[RequestId]) -> None:
        """Batch the short prompts that begin now by the program, over all groups that can begin now."""
        offered = [
            g for g in self.groups if g.is_ready and all(p.view.request_id in fresh_ids for p in g.prefills)
        ]
        loads = {id(g): (g.num_decodes / g.dop, -g.spare) for g in offered}
        offered = sorted(offered, key=lambda g: (not g.prefills, loads[id(g)]))[:MAX_OFFERS]
        offered.sort(key=lambda g: loads[id(g)])
        prefills = sorted(
            (p for g in offered for p in g.prefills), key=lambda p: (-p.num_tokens, p.view.request_id)
        )
        if len(offered) < 2 or not 0 < len(prefills) <= MAX_DEMANDS:
            return
        weights = [1 / max(p.deadline - self.planning_view.snapshot.now, 1e-3) for p in prefills]
        # The cost of an instance for later prompts, which grows with the number of present ones.
        others = len(self.planning_view.snapshot.request) / self.planning_view.num_instances
        price = min(others, 1.5) * max(weights)
        cleared = [Group(g.instance_sets, [], g.spare + sum(map(self.demand, g.prefills))) for g in offered]
        solution = solve(
            [
                Demand(self.demand(p), p.num_tokens, p.num_tokens**2, weight)
                for p, weight in zip(prefills, weights, strict=True)
            ],
            [Offer(g.dop, max(0, g.spare), g.dop * price) for g in cleared],
            [self.cost_model.prefill_terms(dop + 1) for dop in range(sum(g.dop for g in cleared))],
        )
        assert solution is not None, "all of them together have the room that they had promised"
        taken = {id(group) for group in offered}
        self.groups = [*(group for group in self.groups if id(group) not in taken), *cleared]
        for batch in solution.batches:
            self._place(prefills[batch.demands], cleared[batch.offers])

    def demand(self, prefill: PrefillCandidate) -> int:
        """Return the slots that a prompt needs to begin: its own, and those of a first lease."""
        return prefill.num_tokens - 1 + min(self.config.lease_steps, prefill.view.num_remaining_tokens)

    def _place(self, prefills: Iterable[PrefillCandidate], chosen: Sequence[Group]) -> None:
        """Merge the chosen groups into one, which is to compute these prompts too."""
        together = [p for group in chosen for p in group.prefills]
        spare = sum(group.spare for group in chosen)
        for prefill in prefills:
            if prefill not in together:
                together.append(prefill)
                spare -= self.demand(prefill)
        instance_sets = [instance_set for group in chosen for instance_set in group.instance_sets]
        merged = Group(instance_sets, sorted(together, key=attrgetter("rank")), spare)
        taken = {id(group) for group in chosen}
        self.groups = [*(group for group in self.groups if id(group) not in taken), merged]


def _doubled(least: int, most: int) -> Iterator[int]:
    """Yield `least`, twice that, and so on up to `most`."""
    while least < most:
        yield least
        least *= 2
    yield most
