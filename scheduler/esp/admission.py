"""The admission of prompts into the cluster: a prompt begins only if its KV fits until its declared end."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import attrgetter, ge

from loong.core.request import RequestId, RequestView
from loong.scheduler.common.future_kv import FutureKV
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.prompt_order import PrefillCandidate, considered, ordered, starved_first
from loong.scheduler.esp.reasons import (
    NO_ROOM,
    NOT_CONSIDERED,
    ONE_DEFERRED_AT_A_TIME,
    OVERTAKING,
    reason_to_wait,
)


def admit(draft: PlanDraft) -> PlanDraft:
    """Order all prompts not in flight, and admit those that need not wait for room, now or later.

    An admitted prompt finds room until its declared end in any case. A deferred prompt may begin only while
    no other deferred one holds KV. If a prompt has found no room for long, no later one begins.
    """
    now, room = draft.snapshot.now, KVForecast(draft.view)
    chosen, others = considered(draft.view, draft.config)
    views = (*chosen, *draft.view.begun)
    prefills = ordered(views, draft.view, draft.cost_model, draft.config, draft.variant.order)
    admitted, refused = list[PrefillCandidate](), defaultdict[str, list[RequestId]](list)
    is_deferred_begun = any(p.is_deferred and p.is_begun for p in prefills)
    last_arrival = inf
    for prefill in starved_first(prefills, now):
        view = prefill.view
        if prefill.is_begun:
            admitted.append(prefill)
        elif view.arrival_time > last_arrival:
            refused[OVERTAKING].append(view.request_id)
        elif prefill.is_deferred and is_deferred_begun:
            refused[ONE_DEFERRED_AT_A_TIME].append(view.request_id)
        elif room.takes(view):
            is_deferred_begun |= prefill.is_deferred
            admitted.append(prefill)
        else:
            refused[NO_ROOM].append(view.request_id)
            if prefill.is_starved(now):
                last_arrival = min(last_arrival, view.arrival_time)
    refused[NOT_CONSIDERED] += [view.request_id for view in others]
    return replace(
        draft,
        prefills=tuple(sorted(admitted, key=attrgetter("rank"))),
        decisions=tuple(d for why, request_ids in refused.items() for d in reason_to_wait(request_ids, why)),
    )


@dataclass
class KVForecast:
    """The KV of running and admitted requests until their declared ends: a fast bound, or exact if needed."""

    planning_view: PlanningView
    refused: list[tuple[int, int, int]] = field(default_factory=list)  # remaining and known tokens, siblings
    taken: list[RequestView] = field(default_factory=list)  # not yet in the future

    @cached_property
    def bound(self) -> int:
        """Return an upper bound on the slots that will ever be in use at once."""
        return int(self.planning_view.lengths.final.sum())

    @cached_property
    def future(self) -> FutureKV:
        """Return the exact slots in use over time."""
        return FutureKV.of(self.planning_view.lengths)

    def takes(self, view: RequestView) -> bool:
        """Admit a request if it has room until its declared end with all that were taken.

        Return whether it has.
        """
        peak = self.bound + view.num_final_tokens
        if peak > self.planning_view.capacity:
            sizes = (view.num_remaining_tokens, view.num_known_tokens, view.num_siblings)
            if any(all(map(ge, sizes, others)) for others in self.refused):
                return False  # at least as large as one that did not fit: no need to compute
            peak = self._peak_with(view)
            if peak > self.planning_view.capacity:
                self.refused.append(sizes)
                return False
        self.taken.append(view)
        self.bound = peak
        return True

    def _peak_with(self, view: RequestView) -> int:
        """Return the most slots that they and this one need at once, or something above the capacity."""
        for other in self.taken:
            self.future = self.future.adding(other)
        self.taken.clear()
        return self.future.peak_with(view, self.planning_view.capacity)
