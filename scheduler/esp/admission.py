"""The admission of prompts into the cluster: a prompt begins only if its KV fits until its declared end."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from operator import attrgetter

from loong.core.decision import Decision
from loong.core.request import RequestId, RequestView
from loong.scheduler.common.borrowed_kv import SharedOnce
from loong.scheduler.common.future_kv import FutureKV
from loong.scheduler.common.prompt_queue import PromptQueue
from loong.scheduler.common.request_lengths import Lengths
from loong.scheduler.esp.prompt_order import (
    Ordering,
    PrefillCandidate,
    considered,
    ordered,
    starved_first,
)
from loong.scheduler.esp.reasons import WaitReason, reason_to_wait


@dataclass(frozen=True, slots=True)
class Admission:
    """The prompts that may be computed, most urgent first, and why others may not begin."""

    prefills: tuple[PrefillCandidate, ...]
    decisions: tuple[Decision, ...]


def admit(queue: PromptQueue, ordering: Ordering) -> Admission:
    """Order all prompts not in flight, and admit those that need not wait for room, now or later.

    An admitted prompt finds room until its declared end in any case. A deferred prompt may begin only while
    no other deferred one holds KV. If a prompt has found no room for long, no later one begins.
    """
    if not (queue.waiting or queue.begun):
        return Admission((), ())  # as most of many instances planned one by one
    now, room = queue.now, KVForecast(queue.capacity, queue.running)
    chosen, others = considered(queue, ordering.config)
    prefills = ordered((*chosen, *queue.begun), queue, ordering)
    admitted, refused = list[PrefillCandidate](), defaultdict[WaitReason, list[RequestId]](list)
    is_deferred_begun = any(p.is_deferred for p in prefills if p.is_begun)
    last_arrival = inf
    for prefill in starved_first(prefills, now):
        view = prefill.view
        if prefill.is_begun:
            admitted.append(prefill)
        elif view.arrival_time > last_arrival:
            refused[WaitReason.OVERTAKING].append(view.request_id)
        elif prefill.is_deferred and is_deferred_begun:
            refused[WaitReason.ONE_DEFERRED_AT_A_TIME].append(view.request_id)
        elif room.takes(view):
            is_deferred_begun |= prefill.is_deferred
            admitted.append(prefill)
        else:
            refused[WaitReason.NO_ROOM].append(view.request_id)
            if prefill.is_starved(now):
                last_arrival = min(last_arrival, view.arrival_time)
    refused[WaitReason.NOT_CONSIDERED] += [view.request_id for view in others]
    return Admission(
        tuple(sorted(admitted, key=attrgetter("rank"))),
        tuple(d for why, request_ids in refused.items() for d in reason_to_wait(request_ids, why)),
    )


@dataclass
class KVForecast:
    """The KV of running and admitted requests until their declared ends: by bounds, or exact if needed."""

    capacity: int
    running: Sequence[RequestView]
    taken: list[RequestView] = field(default_factory=list)  # not yet in the future
    admitted: list[RequestView] = field(default_factory=list)

    @cached_property
    def views(self) -> list[RequestView]:
        """Return the running requests that have not ended."""
        return [view for view in self.running if not view.has_ended]

    @cached_property
    def bound(self) -> int:
        """Return an upper bound on the slots that will ever be in use at once."""
        return sum([view.num_final_tokens for view in self.views])

    @cached_property
    def together(self) -> SharedOnce:
        """Return the same where KV that several read counts once."""
        together = SharedOnce()
        for view in (*self.views, *self.admitted):
            together.add(view)
        return together

    @cached_property
    def busiest(self) -> tuple[int, int]:
        """Return after how many steps most slots are in use, and a lower bound on their number.

        It is exact unless requests share KV or have siblings; see `FutureKV`.
        """
        ends = [(v.num_remaining_tokens, v.num_known_tokens - 1 - v.num_borrowed_tokens) for v in self.views]
        num_held, step, peak = 0, 0, 0
        for num_alive, (num_remaining, num_current) in enumerate(sorted(ends, reverse=True), start=1):
            num_held += num_current
            if (in_use := num_held + num_remaining * num_alive) > peak:
                step, peak = num_remaining, in_use
        return step, peak

    @cached_property
    def future(self) -> FutureKV:
        """Return the exact slots in use over time."""
        return FutureKV.of(Lengths.of(self.views))

    def takes(self, view: RequestView) -> bool:
        """Admit a request if it has room until its declared end with all that were taken.

        Return whether it has.
        """
        peak = self.bound + view.num_final_tokens
        if peak > self.capacity and not self._fits_by_sharing(view):
            step, least = self.busiest
            if view.num_remaining_tokens >= step and least + step + view.num_known_tokens - 1 > self.capacity:
                return False  # it is there when most slots are in use
            peak = self._peak_with(view)
            if peak > self.capacity:
                return False
        self.taken.append(view)
        self.admitted.append(view)
        self.bound = peak
        if "together" in vars(self):
            self.together.add(view)
        return True

    def _fits_by_sharing(self, view: RequestView) -> bool:
        if not view.borrowed:
            return False
        return self.together.num_tokens + self.together.num_more(view) <= self.capacity

    def _peak_with(self, view: RequestView) -> int:
        """Return the most slots that they and this one need at once."""
        for other in self.taken:
            self.future = self.future.adding(other)
        self.taken.clear()
        return self.future.peak_with(view)
