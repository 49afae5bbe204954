"""The order in which prompts are computed: it meets as many deadlines as possible.

Prompts are taken by deadline. When those taken so far cannot all be in time, the longest of them is deferred
(Moore and Hodgson 1968). That makes the fewest late on one machine, and the cluster is nearly one, since a
prompt can be split over its instances. Deferred prompts come after the others, oldest first, except that the
oldest one gets a share of every step.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel, PrefillTerms
from loong.core.request import RequestView
from loong.scheduler.common.prompt_queue import PromptQueue
from loong.scheduler.common.slo_targets import FirstTokenTargets
from loong.scheduler.config import Fairness, PolicyConfig
from loong.scheduler.tuning import (
    MAX_CONSIDERED,
    MAX_CONSIDERED_PER_INSTANCE,
    MISSED_DEADLINE_WEIGHT,
    PLANNED_TTFT_SHARE,
    STARVATION_FACTOR,
    USABLE_SPEED_SHARE,
)


@dataclass(slots=True, eq=False)
class PrefillCandidate:
    """A prompt to be computed: `num_tokens` new tokens on `num_cached` cached ones.

    `work` is seconds of one instance and `ttft` the target. `deadline` is when its first token is planned,
    before the target, or (`missed_deadline`) its second chance. `is_deferred` if it was deferred. `rank` is
    its place in the order.
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
        return self.view.has_begun

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


@dataclass(frozen=True, slots=True)
class Ordering:
    """The way to order prompts, the same in all parts of a cluster of `cluster_size` full instances.

    `alone` and `widest` are the terms of a prefill on one of them, and of the fastest, on all.
    """

    order: Order
    config: PolicyConfig
    cluster_size: int
    alone: PrefillTerms
    widest: PrefillTerms
    targets: FirstTokenTargets

    @classmethod
    def of(cls, order: Order, cluster_size: int, cost_model: CostModel, config: PolicyConfig) -> "Ordering":
        """Return the way for this cluster."""
        widest = cost_model.prefill_terms(cluster_size)
        targets = FirstTokenTargets(widest, config)
        return cls(order, config, cluster_size, cost_model.prefill_terms(1), widest, targets)


def considered(
    queue: PromptQueue, config: PolicyConfig
) -> tuple[Sequence[RequestView], Sequence[RequestView]]:
    """Return the waiting prompts that are considered now, and the others.

    If more wait than a plan could begin, these are the oldest, which are due first, and the newest, which
    can still be in time. With fairness among users all are considered, as each may be its user's only one.
    """
    waiting = queue.waiting
    half = max(MAX_CONSIDERED, MAX_CONSIDERED_PER_INSTANCE * queue.num_instances) // 2
    if len(waiting) <= 2 * half or config.fairness is Fairness.USER:
        return waiting, ()
    return (*waiting[:half], *waiting[-half:]), waiting[half:-half]


def ordered(
    views: Iterable[RequestView],
    queue: PromptQueue,
    ordering: Ordering,
) -> list[PrefillCandidate]:
    """Return the prompts of these requests of a queue, begun or not, most urgent first."""
    now, num_instances = queue.now, max(1, queue.num_instances)
    terms, targets = ordering.alone, ordering.targets
    speed = USABLE_SPEED_SHARE * num_instances
    prefills = []
    for view in views:
        num_cached = view.placement.num_tokens
        num_new = view.num_prompt_tokens + view.num_output_tokens - num_cached
        work, ttft = prefill_work(num_new, num_cached, terms), targets.of(view)
        planned, earliest = PLANNED_TTFT_SHARE * ttft, now + work / num_instances
        deadline = view.arrival_time + planned
        if missed_deadline := deadline < earliest:
            deadline = _second_deadline(view.arrival_time, planned, earliest)
        prefills.append(PrefillCandidate(view, num_new, num_cached, work, ttft, deadline, missed_deadline))
    if ordering.config.fairness is Fairness.USER:
        served = {v.user for v in queue.running if v.batch_id is not None or v.num_output_tokens}
        prefills = with_fair_deadlines(prefills, now, speed, served)
    ranked = ordering.order(prefills, now, speed)
    for rank, prefill in enumerate(ranked):
        prefill.rank = rank
    return ranked


def _second_deadline(arrival_time: float, planned: float, earliest: float) -> float:
    """Return when a first token is due whose `planned` seconds are too few.

    They double until the deadline can be met.
    """
    while arrival_time + planned < earliest:
        planned *= 2
    return arrival_time + planned


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


def by_deadline(prefills: Iterable[PrefillCandidate], now: float, speed: float) -> list[PrefillCandidate]:
    """Return prompts that can be in time by deadline, then deferred ones by arrival.

    `speed` is the seconds of work that the cluster does in a second.
    """
    by_arrival = sorted(prefills, key=attrgetter("view.arrival_time", "view.request_id"))
    by_deadline = sorted(by_arrival, key=attrgetter("deadline"))  # half the time of one sort by both
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
