"""KV safety: requests may take slots only if all that hold KV can end in some order (banker's algorithm).

Admission assumes that all requests advance together, but a prompt may wait for its instances while others
decode. When KV is short, some requests pause and keep their KV until others finish. This avoids deadlock and
preemption.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from loong.core.request import RequestId
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.common.request_lengths import Lengths
from loong.scheduler.common.shared_prompts import shared_by_last
from loong.scheduler.esp.admission import PrefillCandidate, starved_first


@dataclass(frozen=True, slots=True, eq=False)
class KVNeeds:
    """Slots that each request has, and those that it may still take until its declared end."""

    request_ids: Sequence[RequestId]
    num_held: NDArray[np.int64]
    num_needed: NDArray[np.int64]


class BankersAlgorithm:
    """Grants free slots so that all requests can end one after the other: those that need least first.

    A request without KV blocks no other, and need not be able to end before it begins: it can be last.
    """

    def __init__(self, needs: KVNeeds, num_free: int) -> None:
        order = needs.num_needed.argsort(kind="stable")
        self._place = {needs.request_ids[i]: place for place, i in enumerate(order.tolist())}
        needed, held = needs.num_needed[order], needs.num_held[order]
        # The slots that later requests may take before each would not find all that it needs in its turn.
        self._slack: NDArray[np.int64] = num_free + held.cumsum() - held - needed
        self._holds: NDArray[np.bool_] = held > 0

    def grants_all(self, demands: Mapping[RequestId, int]) -> bool:
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

    def grants(self, request_id: RequestId, num_slots: int) -> bool:
        """Do the same for one request."""
        place = self._place[request_id]
        slack = self._slack[:place]  # of all that it comes after
        if num_slots and slack[self._holds[:place]].min(initial=num_slots) < num_slots:
            return False
        if num_slots and self._slack[place] < 0 and not self._holds[place]:
            return False
        slack -= num_slots
        self._holds[place] |= num_slots > 0
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


@dataclass(frozen=True, slots=True)
class KVSafety:
    """Requests that must pause, and the steps that a lease of the others may have."""

    paused_ids: frozenset[RequestId]
    lease_steps: int


def kv_safety(
    planning_view: PlanningView, prefills: Sequence[PrefillCandidate], lease_steps: int
) -> KVSafety:
    """Choose the requests that must pause: of those not in flight the newest, of `prefills` the least urgent.

    KV of requests that are leaving counts as free, as it will be in any case.
    """
    decodes = planning_view.decodes
    if not (decodes or prefills):
        return KVSafety(frozenset(), lease_steps)
    lengths = planning_view.lengths.adding([prefill.view for prefill in prefills if not prefill.is_begun])
    num_free = sum(planning_view.free.values()) + sum(planning_view.snapshot.leaving.values())
    num_demanded = len(decodes) * lease_steps + sum(prefill.num_tokens for prefill in prefills)
    if num_free - num_demanded >= lengths.final.max(initial=0):
        return KVSafety(frozenset(), lease_steps)  # the first to end finds room, and so do the others then
    banker = BankersAlgorithm(_kv_needs(lengths, planning_view), num_free)
    demands = {view.request_id: 1 for view in decodes}
    paused_ids = set[RequestId]()
    if not banker.grants_all(demands | {prefill.view.request_id: prefill.num_tokens for prefill in prefills}):
        by_age = sorted(decodes, key=attrgetter("arrival_time"))
        paused_ids = {view.request_id for view in by_age if not banker.grants(view.request_id, 1)}
        paused_ids.update(_paused_prompts(banker, prefills, planning_view.snapshot.now))
    num_more = banker.num_more(demands.keys() - paused_ids)
    return KVSafety(
        frozenset(paused_ids), lease_steps if num_more is None else min(lease_steps, 1 + num_more)
    )


def _paused_prompts(
    banker: BankersAlgorithm, prefills: Sequence[PrefillCandidate], now: float
) -> Iterator[RequestId]:
    """Yield prompts that must wait. Starved ones come first, and until they begin no later one does."""
    last_arrival = inf
    for prefill in starved_first(prefills, now):
        view = prefill.view
        is_overtaking = not prefill.is_begun and view.arrival_time > last_arrival
        if is_overtaking or not banker.grants(view.request_id, prefill.num_tokens):
            yield view.request_id
            if prefill.is_starved(now):
                last_arrival = min(last_arrival, view.arrival_time)


def _kv_needs(lengths: Lengths, planning_view: PlanningView) -> KVNeeds:
    """Return the slots that each request holds and needs.

    Slots that choices share become free when the one that needs most has ended."""
    request_ids = [view.request_id for view in lengths.views]
    num_reserved = _reserved(planning_view).get
    held = [view.placement.num_tokens + num_reserved(view.request_id, 0) for view in lengths.views]
    num_held = np.array(held, np.int64)
    num_needed = lengths.final - num_held
    needed_by = {view.request_id: int(num_needed[place]) for place, view in lengths.kin.items()}
    shared = shared_by_last(lengths.kin.values(), lambda view: needed_by[view.request_id])
    for place, view in lengths.kin.items():
        num_held[place] += shared.get(view.request_id, 0) - view.shared.num_tokens
    return KVNeeds(request_ids, num_held, num_needed)


def _reserved(planning_view: PlanningView) -> dict[RequestId, int]:
    """Return the slots that a batch has reserved for each of its requests."""
    reserved = dict[RequestId, int]()
    for batch in planning_view.snapshot.batches:
        reserved |= batch.plan.num_written_tokens
    return reserved
