"""The order in which prompts are computed, and the admission of prompts into the cluster.

The order meets as many deadlines as possible. Prompts are taken by deadline. When those taken so far cannot
all be in time, the longest of them is deferred (Moore and Hodgson 1968). That makes the fewest late on one
machine, and the cluster is nearly one, since a prompt can be split over its instances. Deferred prompts come
after the others, oldest first, except that the oldest one gets a share of every step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel, PrefillTerms
from loong.core.request import RequestView
from loong.scheduler.common.future_kv import FutureKV
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.common.slo_targets import FirstTokenTargets
from loong.scheduler.config import Fairness, PolicyConfig
from loong.scheduler.tuning import (
    BULK_REQUESTS,
    MAX_CONSIDERED,
    MAX_CONSIDERED_PER_INSTANCE,
    MAX_REFUSED,
    MISSED_DEADLINE_WEIGHT,
    STARVATION_FACTOR,
    USABLE_SPEED_SHARE,
)


@dataclass(slots=True, eq=False)
class PrefillCandidate:
    """A prompt to be computed: `num_tokens` new tokens on `num_cached` cached ones.

    `work` is seconds of one instance and `ttft` the target. `deadline` is when its first token is due, or
    (`missed_deadline`) its second chance. `is_deferred` if it was deferred. `rank` is its place in the order.
    """

    view: RequestView
    num_tokens: int
    num_cached: int
    work: float
    ttft: float
    deadline: float
    missed_deadline: bool = False
    is_deferred: bool = False
    rank: int = 0

    @property
    def is_begun(self) -> bool:
        """Return whether some of its KV exists, so that it is bound to instances."""
        return self.num_cached > 0

    @property
    def dop(self) -> int:
        """Return the number of instances that hold some of its KV, or 1."""
        return max(1, len(self.view.placement.instance_ids))

    @property
    def is_late(self) -> bool:
        """Return whether it will miss its target, or has missed it."""
        return self.is_deferred or self.missed_deadline

    @property
    def cost(self) -> float:
        """Return its cost. Of prompts that cannot all be in time, the costliest is deferred."""
        return self.work * (MISSED_DEADLINE_WEIGHT if self.missed_deadline else 1)

    def is_starved(self, now: float) -> bool:
        """Return whether it has waited so long that no later prompt may begin before it."""
        return now - self.view.arrival_time > STARVATION_FACTOR * self.ttft and not self.is_begun


Order: TypeAlias = Callable[[Iterable[PrefillCandidate], float, float], list[PrefillCandidate]]
"""Sorts prompts by urgency, given the time and the cluster's speed in seconds of work a second."""


class Refusal(StrEnum):
    """The reason why a prompt may not begin."""

    NO_ROOM = "there would be too little KV for all that run, and it, to reach their last tokens"
    OVERTAKING = "an older request has waited long for room, and goes first"
    ONE_DEFERRED_AT_A_TIME = "it is deferred, and so is another, which has begun and goes first"
    NOT_TRIED = "several before it wait for room"
    NOT_CONSIDERED = "too many prompts wait: only the oldest and the newest are considered"


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """Prompts that may be computed now, most urgent first, and those that may not, by the reason."""

    prefills: list[PrefillCandidate]
    refused: dict[Refusal, list[RequestView]]


@dataclass(frozen=True, slots=True)
class PrefillAdmission:
    """Orders prompts by `order`, and admits them."""

    planning_view: PlanningView
    cost_model: CostModel
    config: PolicyConfig
    order: Order

    def admit(self) -> AdmissionDecision:
        """Order and admit all prompts not in flight."""
        considered, others = self.considered()
        admission = self._admitted(self.ordered((*considered, *self.planning_view.begun)))
        if others:
            admission.refused[Refusal.NOT_CONSIDERED] = list(others)
        return admission

    def considered(self) -> tuple[Sequence[RequestView], Sequence[RequestView]]:
        """Return the waiting prompts that are considered now, and the others.

        If more wait than a plan could begin, these are the oldest, which are due first, and the newest, which
        can still be in time. With fairness among users all are considered, as each may be its user's only
        one.
        """
        waiting = self.planning_view.waiting
        at_least, an_instance = MAX_CONSIDERED, MAX_CONSIDERED_PER_INSTANCE
        half = max(at_least, an_instance * self.planning_view.num_instances) // 2
        if len(waiting) <= 2 * half or self.config.fairness is Fairness.USER:
            return waiting, ()
        return (*waiting[:half], *waiting[-half:]), waiting[half:-half]

    def ordered(self, views: Iterable[RequestView]) -> list[PrefillCandidate]:
        """Return their prompts, begun or not, most urgent first."""
        now, num_instances = self.planning_view.snapshot.now, max(1, self.planning_view.num_instances)
        terms = self.cost_model.prefill_terms(1)
        widest = self.cost_model.prefill_terms(max(1, self.planning_view.cluster_size))
        targets = FirstTokenTargets(widest, self.config)
        speed = USABLE_SPEED_SHARE * num_instances
        prefills = []
        for view in views:
            num_cached = view.num_computed_tokens
            num_new = view.num_known_tokens - num_cached
            work = prefill_work(num_new, num_cached, terms)
            ttft = targets.of(view)
            deadline, missed_deadline = _deadline(view.arrival_time, ttft, now + work / num_instances)
            prefills.append(
                PrefillCandidate(view, num_new, num_cached, work, ttft, deadline, missed_deadline)
            )
        if self.config.fairness is Fairness.USER:
            running = self.planning_view.snapshot.running
            served = {view.user for view in running if view.batch_id is not None or view.num_output_tokens}
            prefills = with_fair_deadlines(prefills, now, speed, served)
        ordered = self.order(prefills, now, speed)
        for rank, prefill in enumerate(ordered):
            prefill.rank = rank
        return ordered

    def _admitted(self, prefills: Sequence[PrefillCandidate]) -> AdmissionDecision:
        """Admit the prompts that need not wait for room, now or later.

        An admitted prompt finds room until its declared end in any case. A deferred prompt may begin only
        while no other deferred one holds KV. If a prompt has found no room for long, no later one begins.
        """
        now, room = self.planning_view.snapshot.now, KVForecast(self.planning_view)
        admitted, refused = list[PrefillCandidate](), defaultdict[Refusal, list[RequestView]](list)
        is_deferred_begun = any(p.is_deferred and p.is_begun for p in prefills)
        last_arrival = float("inf")
        for prefill in starved_first(prefills, now):
            view = prefill.view
            if prefill.is_begun:
                admitted.append(prefill)
            elif view.arrival_time > last_arrival:
                refused[Refusal.OVERTAKING].append(view)
            elif prefill.is_deferred and is_deferred_begun:
                refused[Refusal.ONE_DEFERRED_AT_A_TIME].append(view)
            elif len(room.refused) == MAX_REFUSED:
                refused[Refusal.NOT_TRIED].append(view)
            elif room.takes(view):
                is_deferred_begun |= prefill.is_deferred
                admitted.append(prefill)
            else:
                refused[Refusal.NO_ROOM].append(view)
                if prefill.is_starved(now):
                    last_arrival = min(last_arrival, view.arrival_time)
        admitted.sort(key=attrgetter("rank"))
        return AdmissionDecision(admitted, dict(refused))


def starved_first(prefills: Sequence[PrefillCandidate], now: float) -> Iterable[PrefillCandidate]:
    """Yield prompts in the order in which they may begin: starved ones first."""
    starved = [
        p for p in prefills if p.missed_deadline and p.is_starved(now)
    ]  # starved prompts have missed their deadlines
    starved.sort(key=lambda p: p.view.arrival_time)
    return dict.fromkeys((*starved, *prefills)) if starved else prefills


def prefill_work(num_new: int, num_cached: int, terms: PrefillTerms) -> float:
    """Return the seconds of one instance that a prompt takes in full steps."""
    return num_new * (terms.per_token + terms.per_cached_pair * num_cached + terms.per_new_pair * num_new)


def is_share_due(
    prefill: PrefillCandidate, dop: int, now: float, cost_model: CostModel, config: PolicyConfig
) -> bool:
    """Return whether `deferred_share` of the prompt's age covers twice the time already spent on it."""
    done = prefill_work(prefill.num_cached, 0, cost_model.prefill_terms(1)) / dop
    age = now - prefill.view.arrival_time
    return config.deferred_share > 0 and config.deferred_share * age >= 2 * done


def by_deadline(prefills: Iterable[PrefillCandidate], now: float, speed: float) -> list[PrefillCandidate]:
    """Return prompts that can be in time by deadline, then deferred ones by arrival.

    `speed` is the seconds of work that the cluster does in a second.
    """
    by_id = sorted(prefills, key=attrgetter("view.request_id"))
    by_deadline = sorted(by_id, key=attrgetter("deadline"))  # half the time of one sort by both
    dearest: list[tuple[float, int]] = []  # a heap of (-cost, index) of those that were `counted`
    deferred: set[int] = set()
    end, counted = now, 0
    for index, prefill in enumerate(by_deadline):
        end += prefill.work / speed
        if end <= prefill.deadline:
            continue
        for taken in range(counted, index + 1):
            heappush(dearest, (-by_deadline[taken].cost, taken))
        counted = index + 1
        while dearest and end > prefill.deadline:  # removing the costliest may not be enough
            _, removed = heappop(dearest)
            deferred.add(removed)
            end -= by_deadline[removed].work / speed
    last = sorted((by_deadline[i] for i in deferred), key=lambda p: (p.view.arrival_time, p.view.request_id))
    for prefill in last:
        prefill.is_deferred = True
    return [p for i, p in enumerate(by_deadline) if i not in deferred] + last


def by_arrival(prefills: Iterable[PrefillCandidate], now: float, speed: float) -> list[PrefillCandidate]:  # noqa: ARG001
    """Return prompts first come, first served."""
    return sorted(prefills, key=lambda p: (p.view.arrival_time, p.view.request_id))


def with_fair_deadlines(
    prefills: Iterable[PrefillCandidate], now: float, speed: float, served: Set[str]
) -> list[PrefillCandidate]:
    """Return prompts with later deadlines: not before the user's equal share of the cluster computes them.

    So a user who sends much is late for much of it, and other users are not. Prompts of users without running
    requests, unlike the `served` users, are due as soon as the share has computed them. So later prompts of
    other users do not pass them.
    """
    by_user: dict[str, list[PrefillCandidate]] = {}
    for prefill in sorted(prefills, key=lambda p: (p.view.arrival_time, p.view.request_id)):
        by_user.setdefault(prefill.view.user, []).append(prefill)
    for user, own in by_user.items() if len(by_user) > 1 else ():
        seconds = (p.work * len(by_user) / speed for p in own)
        ends = list(accumulate(seconds, initial=now))[1:]
        for prefill, end in zip(own, ends, strict=True):
            prefill.deadline = max(prefill.deadline, end) if user in served else end
    return [prefill for own in by_user.values() for prefill in own]


@dataclass
class KVForecast:
    """The KV of admitted requests until their declared ends: by a fast bound, and exactly if needed.

    It counts running requests, and those taken. It is computed on demand.
    """

    planning_view: PlanningView
    refused: list[tuple[int, int, int]] = field(default_factory=list)  # remaining and known tokens, siblings
    taken: list[RequestView] = field(default_factory=list)
    future: FutureKV | None = None  # with `num_counted` of `taken`
    num_counted: int = 0

    @cached_property
    def bound(self) -> int:
        """Return an upper bound on the slots that will ever be in use at once."""
        return int(self.planning_view.lengths.final.sum())

    def takes(self, view: RequestView) -> bool:
        """Admit a request if it has room until its declared end with all that were taken.

        Return whether it has.
        """
        peak = self.bound + view.num_final_tokens
        if peak > self.planning_view.capacity:
            remaining, known, num_siblings = (
                view.num_remaining_tokens,
                view.num_known_tokens,
                view.num_siblings,
            )
            if any(remaining >= r and known >= k and num_siblings >= f for r, k, f in self.refused):
                return False  # at least as large as one that did not fit: no need to compute
            peak = self._peak_with(view)
            if peak > self.planning_view.capacity:
                self.refused.append((remaining, known, num_siblings))
                return False
        self.taken.append(view)
        self.bound = peak
        return True

    def _peak_with(self, view: RequestView) -> int:
        """Return the most slots that admitted requests and this one need at once, or a bound that fits."""
        future, new = self.future, self.taken[self.num_counted :]
        if future is None or len(new) > BULK_REQUESTS:
            future = FutureKV.of(self.planning_view.lengths.adding(self.taken))
        else:
            for other in new:
                future = future.adding(other)
        if future is not self.future:
            self.future, self.num_counted, self.bound = future, len(self.taken), future.peak
        bound = self.bound + view.num_final_tokens
        return (
            bound
            if bound <= self.planning_view.capacity
            else future.peak_with(view, self.planning_view.capacity)
        )


def _deadline(arrival_time: float, ttft: float, earliest: float) -> tuple[float, bool]:
    """Return when a first token is due, and whether that is a second chance.

    If the deadline can no longer be met, the target doubles until it can.
    """
    budget = ttft
    while arrival_time + budget < earliest:
        budget *= 2
    return arrival_time + budget, budget > ttft
