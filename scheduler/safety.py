"""Who may take slots now, so that all who hold any can end in some order: Dijkstra's banker's algorithm.

Admission foresees that every request goes on at one pace. They do not: a prompt may wait for its instances
while others decode. So when slots are few, some wait with what they have until others have ended, rather than
that all are stuck together and one must be computed again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from loong.core.request import RequestId
from loong.scheduler.dispatch import Prefill, overdue_first
from loong.scheduler.families import shared_by_last
from loong.scheduler.lengths import Lengths
from loong.scheduler.survey import Survey


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """Slots that each request has, and those that it may still take until its declared end."""

    request_ids: Sequence[RequestId]
    num_held: NDArray[np.int64]
    num_needed: NDArray[np.int64]


class Bank:
    """Free slots, lent so that all can end one after the other: those first who need least.

    Who holds nothing yet is in nobody's way, and need not be able to end before it begins: it can go last.
    """

    def __init__(self, claims: Claims, num_free: int) -> None:
        order = claims.num_needed.argsort(kind="stable")
        self._place = {claims.request_ids[i]: place for place, i in enumerate(order.tolist())}
        needed, held = claims.num_needed[order], claims.num_held[order]
        # What all after each may take before it would not find all that it needs when its turn comes.
        self._slack: NDArray[np.int64] = num_free + held.cumsum() - held - needed
        self._holds: NDArray[np.bool_] = held > 0

    def lends(self, wishes: Mapping[RequestId, int]) -> bool:
        """Take so many slots for each request, unless another might then not end."""
        wished = self._by_place(wishes)
        num_after = _sum_after(wished)
        slack, holds = self._slack - num_after, self._holds | (wished > 0)
        if (slack[holds & ((num_after > 0) | ~self._holds)] < 0).any():
            return False
        self._slack, self._holds = slack, holds
        return True

    def lends_to(self, request_id: RequestId, num_slots: int) -> bool:
        """The same for one request."""
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
        """How many slots each of these, who all hold some, may take besides; None if as many as there are."""
        num_after = _sum_after(self._by_place(dict.fromkeys(request_ids, 1)))
        is_bound = self._holds & (num_after > 0)
        limits = self._slack[is_bound] // num_after[is_bound]
        return max(0, int(limits.min())) if len(limits) else None

    def _by_place(self, wishes: Mapping[RequestId, int]) -> NDArray[np.int64]:
        num_slots = np.zeros(len(self._slack), np.int64)
        for request_id, wished in wishes.items():
            num_slots[self._place[request_id]] = wished
        return num_slots


def _sum_after(num_slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many slots those after each wish to take."""
    return num_slots[::-1].cumsum()[::-1] - num_slots


@dataclass(frozen=True, slots=True)
class Safety:
    """Requests that are to wait, and how many steps a lease of the others may have."""

    paused_ids: frozenset[RequestId]
    lease_steps: int


def safety(survey: Survey, prefills: Sequence[Prefill], lease_steps: int) -> Safety:
    """Whom to let go on of those at rest, the oldest first, and of `prefills`, most urgent first.

    What is leaving counts as free: it will be, whoever goes on.
    """
    decodes = [view for unit in survey.resting for view in unit.decodes]
    lengths = survey.lengths.adding([prefill.view for prefill in prefills if not prefill.is_begun])
    num_free = sum(survey.free.values()) + sum(survey.snapshot.leaving.values())
    num_wished = len(decodes) * lease_steps + sum(prefill.num_tokens for prefill in prefills)
    if num_free - num_wished >= lengths.final.max(initial=0):
        return Safety(frozenset(), lease_steps)  # whoever is first to end finds room, and so do the rest
    bank = Bank(_claims(lengths, survey), num_free)
    wishes = {view.request_id: 1 for view in decodes}
    paused_ids = set[RequestId]()
    if not bank.lends(wishes | {prefill.view.request_id: prefill.num_tokens for prefill in prefills}):
        by_age = sorted(decodes, key=attrgetter("arrival_time"))
        paused_ids = {view.request_id for view in by_age if not bank.lends_to(view.request_id, 1)}
        paused_ids.update(_paused_prompts(bank, prefills, survey.snapshot.now))
    num_more = bank.num_more(wishes.keys() - paused_ids)
    return Safety(frozenset(paused_ids), lease_steps if num_more is None else min(lease_steps, 1 + num_more))


def _paused_prompts(bank: Bank, prefills: Sequence[Prefill], now: float) -> Iterator[RequestId]:
    """Prompts that are to wait. Those that are overdue come first, and until they begin no later one does."""
    last_arrival = inf
    for prefill in overdue_first(prefills, now):
        view = prefill.view
        is_overtaking = not prefill.is_begun and view.arrival_time > last_arrival
        if is_overtaking or not bank.lends_to(view.request_id, prefill.num_tokens):
            yield view.request_id
            if prefill.is_overdue(now):
                last_arrival = min(last_arrival, view.arrival_time)


def _claims(lengths: Lengths, survey: Survey) -> Claims:
    """What each holds and needs; what a family shares is free when the one that needs most has ended."""
    request_ids = [view.request_id for view in lengths.views]
    num_reserved = _reserved(survey).get
    held = [view.placement.num_tokens + num_reserved(view.request_id, 0) for view in lengths.views]
    num_held = np.array(held, np.int64)
    num_needed = lengths.final - num_held
    needed_by = {view.request_id: int(num_needed[place]) for place, view in lengths.kin.items()}
    shared = shared_by_last(lengths.kin.values(), lambda view: needed_by[view.request_id])
    for place, view in lengths.kin.items():
        num_held[place] += shared.get(view.request_id, 0) - view.shared.num_tokens
    return Claims(request_ids, num_held, num_needed)


def _reserved(survey: Survey) -> dict[RequestId, int]:
    """Slots that a batch has reserved for each of its requests."""
    reserved = dict[RequestId, int]()
    for batch in survey.snapshot.batches:
        reserved |= batch.plan.num_written_tokens
    return reserved
