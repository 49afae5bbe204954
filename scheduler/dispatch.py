"""In which order prompts are computed, and which of them may enter the cluster.

The order keeps as many deadlines as can be kept. Prompts are taken by deadline; when those taken so far
cannot all be in time, the longest of them is put off (Moore and Hodgson 1968: that makes the fewest late on
one machine, and the cluster is nearly one, since a prompt can be cut over its instances). Those put off come
after the others, oldest first, but for a share of every step that is the oldest one's.
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

from loong.core.cost_model import CostModel, PrefillTerms
from loong.core.request import RequestId, RequestView
from loong.scheduler.config import Fairness, PolicyConfig
from loong.scheduler.equations import FutureKV
from loong.scheduler.survey import Survey
from loong.scheduler.targets import FirstTokenTargets

SECOND_CHANCE_COST = 4  # a prompt that has missed its deadline counts as so much longer when one is put off
USABLE_SPEED = 0.8  # of the cluster, beside decode and the ends of steps
MAX_REFUSED = 4  # prompts for which there is no room, after which no other is tried in a round
MAX_WEIGHED = 512, 2  # waiting prompts that a plan weighs, and so many an instance if that is more
MANY = 8  # requests, from which the KV of all to come is reckoned anew, and not one by one
PATIENCE = 4  # TTFT targets after which a prompt that finds no room is let past by no one any more


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt to be computed: `num_tokens` new ones on `num_cached`.

    `work` is seconds of one instance and `ttft` the target. `deadline` is when its first token is due, or
    (`is_missed`) its second chance. `is_late` if it was put off. `rank` is its place in the order.
    """

    view: RequestView
    num_tokens: int
    num_cached: int
    work: float
    ttft: float
    deadline: float
    is_missed: bool = False
    is_late: bool = False
    rank: int = 0

    @property
    def is_begun(self) -> bool:
        """Whether some of its KV exists, so that it is bound to instances."""
        return self.num_cached > 0

    @property
    def cost(self) -> float:
        """Of the prompts that cannot all be in time, the one that costs most is put off."""
        return self.work * (SECOND_CHANCE_COST if self.is_missed else 1)

    def is_overdue(self, now: float) -> bool:
        """Whether it has waited for so long that none that came after it begins before it does."""
        return now - self.view.arrival_time > PATIENCE * self.ttft and not self.is_begun


Order: TypeAlias = Callable[[Iterable[Prefill], float, float], list[Prefill]]
"""Most urgent first, given the time and the seconds of work that the cluster does in a second."""


class Refusal(StrEnum):
    """Why a prompt may not begin."""

    NO_ROOM = "there would be too little KV for all that run, and it, to reach their last tokens"
    OVERTAKING = "an older request has waited long for room, and goes first"
    PUT_OFF = "it is put off, and so is another, which has begun and goes first"
    NOT_TRIED = "several before it wait for room"
    NOT_WEIGHED = "so many prompts wait that only the oldest and the newest are weighed"


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Prompts that may be computed now, most urgent first, and those that may not, by the reason."""

    prefills: list[Prefill]
    refused: dict[Refusal, list[RequestView]]

    def hold_back(self, request_ids: Set[RequestId]) -> None:
        """Leave these out after all."""
        self.prefills[:] = [p for p in self.prefills if p.view.request_id not in request_ids]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Orders prompts by `order`, and admits them."""

    survey: Survey
    cost_model: CostModel
    config: PolicyConfig
    order: Order

    def dispatch(self) -> Dispatched:
        """All prompts at rest."""
        weighed, others = self._weighed()
        dispatched = self._admitted(self._ordered(weighed))
        if others:
            dispatched.refused[Refusal.NOT_WEIGHED] = list(others)
        return dispatched

    def _weighed(self) -> tuple[Sequence[RequestView], Sequence[RequestView]]:
        """The waiting prompts that are weighed now, and those that are not.

        Of a crowd that no plan could begin at once these are the oldest, which are due first, and the newest,
        which can still be in time. Where users share, each prompt counts, as it may be its user's only one.
        """
        waiting = self.survey.waiting
        at_least, an_instance = MAX_WEIGHED
        half = max(at_least, an_instance * self.survey.num_instances) // 2
        if len(waiting) <= 2 * half or self.config.fairness is Fairness.USER:
            return waiting, ()
        return (*waiting[:half], *waiting[-half:]), waiting[half:-half]

    def _ordered(self, waiting: Sequence[RequestView]) -> list[Prefill]:
        """These and the prompts that have begun, most urgent first."""
        now, num_instances = self.survey.snapshot.now, max(1, self.survey.num_instances)
        terms = self.cost_model.prefill_terms(1)
        targets = FirstTokenTargets(self.cost_model.prefill_terms(num_instances), self.config)
        speed = USABLE_SPEED * num_instances
        begun = (view for unit in self.survey.resting for view in unit.prefills)
        prefills = []
        for view in (*waiting, *begun):
            num_cached = view.num_computed_tokens
            num_new = view.num_known_tokens - num_cached
            work = prefill_work(num_new, num_cached, terms)
            ttft = targets.of(view)
            deadline, is_missed = _deadline(view.arrival_time, ttft, now + work / num_instances)
            prefills.append(Prefill(view, num_new, num_cached, work, ttft, deadline, is_missed))
        if self.config.fairness is Fairness.USER:
            running = self.survey.snapshot.running
            served = {view.user for view in running if view.batch_id is not None or view.num_output_tokens}
            prefills = with_fair_deadlines(prefills, now, speed, served)
        ordered = self.order(prefills, now, speed)
        for rank, prefill in enumerate(ordered):
            prefill.rank = rank
        return ordered

    def _admitted(self, prefills: Sequence[Prefill]) -> Dispatched:
        """All but the prompts that would have to wait for room, now or later.

        What is admitted finds room to its declared end, whatever comes. A prompt that was put off may begin
        only while no other one holds KV; and if one has found no room for long, none that came after begins.
        """
        now, room = self.survey.snapshot.now, Room(self.survey)
        admitted, refused = list[Prefill](), defaultdict[Refusal, list[RequestView]](list)
        is_late_begun = any(p.is_late and p.is_begun for p in prefills)
        last_arrival = float("inf")
        for prefill in overdue_first(prefills, now):
            view = prefill.view
            if prefill.is_begun:
                admitted.append(prefill)
            elif view.arrival_time > last_arrival:
                refused[Refusal.OVERTAKING].append(view)
            elif prefill.is_late and is_late_begun:
                refused[Refusal.PUT_OFF].append(view)
            elif len(room.refused) == MAX_REFUSED:
                refused[Refusal.NOT_TRIED].append(view)
            elif room.takes(view):
                is_late_begun |= prefill.is_late
                admitted.append(prefill)
            else:
                refused[Refusal.NO_ROOM].append(view)
                if prefill.is_overdue(now):
                    last_arrival = min(last_arrival, view.arrival_time)
        admitted.sort(key=attrgetter("rank"))
        return Dispatched(admitted, dict(refused))


def overdue_first(prefills: Sequence[Prefill], now: float) -> Iterable[Prefill]:
    """In the order in which they may begin: those that have waited for long come before all others."""
    overdue = [p for p in prefills if p.is_missed and p.is_overdue(now)]  # who is overdue has missed
    overdue.sort(key=lambda p: p.view.arrival_time)
    return dict.fromkeys((*overdue, *prefills)) if overdue else prefills


def prefill_work(num_new: int, num_cached: int, terms: PrefillTerms) -> float:
    """Seconds of one instance that a prompt takes in full steps."""
    return num_new * (terms.per_token + terms.per_cached_pair * num_cached + terms.per_new_pair * num_new)


def is_due(late: Prefill, dop: int, now: float, cost_model: CostModel, config: PolicyConfig) -> bool:
    """Whether the share of the time since it came has paid for what is computed, and as much reading."""
    done = prefill_work(late.num_cached, 0, cost_model.prefill_terms(1)) / dop
    age = now - late.view.arrival_time
    return config.late_share > 0 and config.late_share * age >= 2 * done


def by_deadline(prefills: Iterable[Prefill], now: float, speed: float) -> list[Prefill]:
    """Those that can be in time by deadline, then those put off by arrival.

    `speed` is the seconds of work that the cluster does in a second.
    """
    by_id = sorted(prefills, key=attrgetter("view.request_id"))
    by_deadline = sorted(by_id, key=attrgetter("deadline"))  # half the time of one sort by both
    dearest: list[tuple[float, int]] = []  # a heap of (-cost, index) of those that were `counted`
    put_off: set[int] = set()
    end, counted = now, 0
    for index, prefill in enumerate(by_deadline):
        end += prefill.work / speed
        if end <= prefill.deadline:
            continue
        for taken in range(counted, index + 1):
            heappush(dearest, (-by_deadline[taken].cost, taken))
        counted = index + 1
        while dearest and end > prefill.deadline:  # the dearest may be too short
            _, removed = heappop(dearest)
            put_off.add(removed)
            end -= by_deadline[removed].work / speed
    late = sorted((by_deadline[i] for i in put_off), key=lambda p: (p.view.arrival_time, p.view.request_id))
    for prefill in late:
        prefill.is_late = True
    return [p for i, p in enumerate(by_deadline) if i not in put_off] + late


def by_arrival(prefills: Iterable[Prefill], now: float, speed: float) -> list[Prefill]:  # noqa: ARG001
    """First come, first served."""
    return sorted(prefills, key=lambda p: (p.view.arrival_time, p.view.request_id))


def with_fair_deadlines(
    prefills: Iterable[Prefill], now: float, speed: float, served: Set[str]
) -> list[Prefill]:
    """No prompt is due before its user's equal share of the cluster would have it done.

    So who sends much is late for much of it, and nobody else is. Those of whom nothing runs, unlike the
    `served` users, are due as soon as that share has them done, so that what comes later does not go first.
    """
    by_user: dict[str, list[Prefill]] = {}
    for prefill in sorted(prefills, key=lambda p: (p.view.arrival_time, p.view.request_id)):
        by_user.setdefault(prefill.view.user, []).append(prefill)
    for user, own in by_user.items() if len(by_user) > 1 else ():
        seconds = (p.work * len(by_user) / speed for p in own)
        ends = list(accumulate(seconds, initial=now))[1:]
        for prefill, end in zip(own, ends, strict=True):
            prefill.deadline = max(prefill.deadline, end) if user in served else end
    return [prefill for own in by_user.values() for prefill in own]


@dataclass
class Room:
    """KV of those admitted, to their declared ends: by a bound, which is quick, and if need be exactly.

    That is of running requests, and of those taken. Nothing is reckoned before it is asked for.
    """

    survey: Survey
    refused: list[tuple[int, int, int]] = field(default_factory=list)  # remaining and known tokens, forks
    taken: list[RequestView] = field(default_factory=list)
    future: FutureKV | None = None  # with as many of `taken`
    num_reckoned: int = 0

    @cached_property
    def bound(self) -> int:
        """No less than the slots that will ever be in use at once."""
        return int(self.survey.lengths.final.sum())

    def takes(self, view: RequestView) -> bool:
        """Admit a request, if it has room to its declared end with all that were taken."""
        peak = self.bound + view.num_final_tokens
        if peak > self.survey.capacity:
            remaining, known, num_forks = view.num_remaining_tokens, view.num_known_tokens, view.num_forks
            if any(remaining >= r and known >= k and num_forks >= f for r, k, f in self.refused):
                return False  # no less than one that did not fit: no need to reckon
            peak = self._peak_with(view)
            if peak > self.survey.capacity:
                self.refused.append((remaining, known, num_forks))
                return False
        self.taken.append(view)
        self.bound = peak
        return True

    def _peak_with(self, view: RequestView) -> int:
        """The most slots that those admitted and this one may come to need at once, or a bound that fits."""
        future, new = self.future, self.taken[self.num_reckoned :]
        if future is None or len(new) > MANY:
            future = FutureKV.of(self.survey.lengths.adding(self.taken))
        else:
            for other in new:
                future = future.adding(other)
        if future is not self.future:
            self.future, self.num_reckoned, self.bound = future, len(self.taken), future.peak
        bound = self.bound + view.num_final_tokens
        return bound if bound <= self.survey.capacity else future.peak_with(view, self.survey.capacity)


def _deadline(arrival_time: float, ttft: float, earliest: float) -> tuple[float, bool]:
    """When a first token is due, and whether that is a second chance.

    Once it cannot be in time any more, its target doubles until it can.
    """
    budget = ttft
    while arrival_time + budget < earliest:
        budget *= 2
    return arrival_time + budget, budget > ttft
