"""The admission of prompts into the cluster: a prompt begins only if its KV fits until its declared end."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from operator import attrgetter

from loong.core.request import RequestId, RequestView
from loong.scheduler.common.future_kv import FutureKV
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.prompt_order import PrefillCandidate, considered, ordered, starved_first
from loong.scheduler.esp.reasons import (
    NO_ROOM,
    NOT_CONSIDERED,
    NOT_TRIED,
    ONE_DEFERRED_AT_A_TIME,
    OVERTAKING,
    reason_to_wait,
)
from loong.scheduler.tuning import BULK_REQUESTS, MAX_REFUSED


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
        elif len(room.refused) == MAX_REFUSED:
            refused[NOT_TRIED].append(view.request_id)
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
