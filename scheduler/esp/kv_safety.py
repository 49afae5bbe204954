"""KV safety: requests may take slots only if all that hold KV can end in some order (banker's algorithm).

Admission assumes that all requests advance together, but a prompt may wait for its instances while others
decode. When KV is short, some requests pause and keep their KV until others finish. This avoids deadlock and
preemption.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from loong.core.request import RequestId
from loong.scheduler.common.borrowed_kv import borrowed_by_last
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.common.request_lengths import Lengths
from loong.scheduler.esp.draft import PlanDraft
from loong.scheduler.esp.prompt_order import PrefillCandidate, starved_first
from loong.scheduler.esp.reasons import WaitReason, reason_to_wait
from loong.scheduler.tuning import LONG_LEASE_FACTOR


class BankersAlgorithm:
    """Grants free slots so that all requests can end one after the other: those that need least first.

    Each request has `num_held` slots, and may still take `num_needed` until its declared end. A request
    without KV blocks no other, and need not be able to end before it begins: it can be last.
    """

    def __init__(
        self,
        request_ids: Sequence[RequestId],
        num_held: NDArray[np.int64],
        num_needed: NDArray[np.int64],
        num_free: int,
    ) -> None:
        order = num_needed.argsort(kind="stable")
        self._place = {request_ids[i]: place for place, i in enumerate(order.tolist())}
        needed, held = num_needed[order], num_held[order]
        # The slots that later requests may take before each would not find all that it needs in its turn.
        self._slack: NDArray[np.int64] = num_free + held.cumsum() - held - needed
        self._holds: NDArray[np.bool_] = held > 0

    def grants(self, demands: Mapping[RequestId, int]) -> bool:
        """Take these slots for each request, unless another might then not end.

        Return whether they are granted.
        """
        demanded = self._by_place(demands)
        num_after = _sum_after(demanded)
        slack, holds = self._slack - num_after, self._holds | (demanded > 0)
        if (slack[holds & ((num_after > 0) | ~self._holds)] < 0).any():
            return False
        self._slack, self._holds = slack, holds
        return True

    def num_more(self, request_ids: Iterable[RequestId]) -> int | None:
        """Return the slots that each of these requests, which all hold some, may take.

        None if there is no limit.
        """
        num_after = _sum_after(self._by_place(dict.fromkeys(request_ids, 1)))
        is_bound = self._holds & (num_after > 0)
        limits = self._slack[is_bound] // num_after[is_bound]
        return max(0, int(limits.min())) if len(limits) else None

    def _by_place(self, demands: Mapping[RequestId, int]) -> NDArray[np.int64]:
        num_slots = np.zeros(len(self._slack), np.int64)
        for request_id, demanded in demands.items():
            num_slots[self._place[request_id]] = demanded
        return num_slots


def _sum_after(num_slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the slots of all requests after each."""
    return num_slots[::-1].cumsum()[::-1] - num_slots


def pause_unsafe(draft: PlanDraft) -> PlanDraft:
    """Pause requests whose next slots others need to end, and limit the steps of a lease of the others.

    The newest decodes and the least urgent prompts pause. KV of requests that are leaving counts as free, as
    it will be in any case.
    """
    view, prefills, decodes = draft.view, draft.prefills, draft.view.decodes
    lease_steps = draft.config.lease_steps * (LONG_LEASE_FACTOR if view.is_quiet else 1)
    draft = replace(draft, decodes=decodes, lease_steps=lease_steps)
    if not (decodes or prefills):
        return draft
    lengths = view.lengths.adding([prefill.view for prefill in prefills if not prefill.is_begun])
    num_free = sum(view.free.values()) + sum(view.snapshot.leaving.values())
    num_free += sum(view.snapshot.memory_free.values())  # where KV of decodes can go
    num_demanded = len(decodes) * lease_steps + sum(prefill.num_tokens for prefill in prefills)
    if num_free - num_demanded >= lengths.final.max(initial=0):
        return draft  # the first to end finds room, and so do the others then
    banker = _banker(lengths, view, num_free)
    demands = {decode.request_id: 1 for decode in decodes}
    paused_ids = set[RequestId]()
    if not banker.grants(demands | {prefill.view.request_id: prefill.num_tokens for prefill in prefills}):
        by_age = sorted(decodes, key=attrgetter("arrival_time"))
        paused_ids.update(d.request_id for d in by_age if not banker.grants({d.request_id: 1}))
        paused_ids.update(_paused_prompts(banker, prefills, view.snapshot.now))
    num_more = banker.num_more(demands.keys() - paused_ids)
    return replace(
        draft,
        prefills=tuple(prefill for prefill in prefills if prefill.view.request_id not in paused_ids),
        decodes=tuple(decode for decode in decodes if decode.request_id not in paused_ids),
        lease_steps=lease_steps if num_more is None else min(lease_steps, 1 + num_more),
        decisions=(*draft.decisions, *reason_to_wait(sorted(paused_ids), WaitReason.PAUSED)),
    )


def _paused_prompts(
    banker: BankersAlgorithm, prefills: Sequence[PrefillCandidate], now: float
) -> Iterator[RequestId]:
    """Yield prompts that must wait. Starved ones come first, and until they begin no later one does."""
    last_arrival = inf
    for prefill in starved_first(prefills, now):
        view = prefill.view
        is_overtaking = not prefill.is_begun and view.arrival_time > last_arrival
        if is_overtaking or not banker.grants({view.request_id: prefill.num_tokens}):
            yield view.request_id
            if prefill.is_starved(now):
                last_arrival = min(last_arrival, view.arrival_time)


def _banker(lengths: Lengths, view: PlanningView, num_free: int) -> BankersAlgorithm:
    """Return a banker of these requests, which hold what batches have reserved for them.

    Slots that choices share become free when the one that needs most has ended.
    """
    reserved = dict[RequestId, int]()
    for batch in view.snapshot.batches:
        reserved |= batch.plan.num_written_tokens
    held = [v.placement.num_tokens + reserved.get(v.request_id, 0) for v in lengths.views]
    num_held = np.array(held, np.int64)
    num_needed = lengths.final - num_held
    needed_by = {v.request_id: int(num_needed[place]) for place, v in lengths.kin.items()}
    shared = borrowed_by_last(lengths.kin.values(), lambda v: needed_by[v.request_id])
    for place, v in lengths.kin.items():
        num_held[place] += shared.get(v.request_id, 0) - v.num_borrowed_tokens
    return BankersAlgorithm([v.request_id for v in lengths.views], num_held, num_needed, num_free)
