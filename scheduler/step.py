"""One step in the making: requests are added to a group until its time, its tokens or its room is used up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from loong.core.cost_model import CostModel, PrefillTerms
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, Transfer
from loong.core.request import RequestView
from loong.core.work import InstanceWork, StepWork
from loong.scheduler.striping import (
    Share,
    batch_of,
    decode_share,
    retained_share,
    striped_share,
    whole_share,
)

LEAST_PART = 0.05  # of a step: a chunk that takes less is not worth its overhead


@dataclass(slots=True)
class Step:
    """A batch for `instance_ids`. `free` is their free slots, which what is added uses up.

    An instance computes at most `max_tokens`, and at least `min_tokens` of a prompt, however long that takes.
    """

    instance_ids: tuple[InstanceId, ...]
    free: dict[InstanceId, int]
    cost_model: CostModel
    max_tokens: int
    works: dict[InstanceId, InstanceWork] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)
    has_ring: bool = False
    has_exchange: bool = False
    min_tokens: int = 0
    alone: PrefillTerms = field(init=False)
    wide: PrefillTerms = field(init=False)
    used: dict[InstanceId, float] = field(default_factory=dict)  # seconds, of each instance

    def __post_init__(self) -> None:
        self.alone, self.wide = self.cost_model.prefill_terms(1), self.cost_model.prefill_terms(self.dop)
        for instance_id in self.instance_ids:
            self.works[instance_id] = InstanceWork()
            self.used[instance_id] = self.alone.floor  # the first token costs no less

    @property
    def dop(self) -> int:
        """The number of its instances."""
        return len(self.instance_ids)

    @property
    def seconds(self) -> float:
        """Predicted."""
        return self.cost_model.step_time(StepWork(self._group, self.works, self.has_ring, self.has_exchange))

    def add_decode(self, view: RequestView, master_id: InstanceId, num_steps: int) -> None:
        """One token a step."""
        self.shares.append(decode_share(view, master_id, num_steps))
        self.free[master_id] -= min(num_steps, view.num_remaining_tokens)
        master = self.works[master_id]
        master.num_tokens += 1
        master.num_blocks += 1
        master.num_attends += 1
        for instance_id, num_keys in view.placement.tokens_by_instance().items():
            self.works[instance_id].num_decode_keys += num_keys
            if instance_id != master_id:
                self.works[instance_id].num_attends += 1
                master.num_sent_queries += 1
                self.has_exchange = True

    def add_whole(self, view: RequestView, master_id: InstanceId, budget: float) -> int:
        """As much of a prompt as one instance computes within a step of `budget`; its KV must all be there.

        Returns the number of tokens.
        """
        num_tokens = min(
            self.num_fitting(master_id, view.num_computed_tokens, budget),
            view.num_uncomputed_tokens,
            self.free[master_id],
        )
        if num_tokens > 0:
            self.shares.append(whole_share(view, num_tokens, master_id))
            self.free[master_id] -= num_tokens
            self._add_work(master_id, num_tokens, num_tokens * (view.num_computed_tokens + num_tokens / 2))
            self._reckon(master_id, self.works[master_id])
        return num_tokens

    def add_striped(self, view: RequestView, budget: float) -> int:
        """As much of a prompt as all instances compute within a step of `budget`, in stripes.

        The last chunk of a prompt that has all its KV on one instance, or none yet, goes round the ring, and
        its KV stays on that instance, so that the group is free again. Other chunks stay where they are made
        if there is room, and travel by the quicker way. Returns the number of tokens.
        """
        held = view.placement.tokens_by_instance()
        by_exchange = self._num_exchanged(held, budget)
        by_ring = self._num_ringed(view.num_computed_tokens, budget)
        keepers = self.keepers(view, max(by_exchange, by_ring), by_ring)
        transfer = Transfer.KV if keepers or by_ring > by_exchange else Transfer.QUERY
        num_tokens = min(view.num_uncomputed_tokens, by_ring if keepers else max(by_exchange, by_ring))
        num_tokens = min(num_tokens, sum(keepers.values()) or self.dop * min(self.free.values()))
        if not keepers and num_tokens < view.num_uncomputed_tokens:
            num_tokens -= num_tokens % self.dop  # so that the next chunk goes on in the same stripes
        if num_tokens <= 0:
            return 0
        if keepers:
            share = retained_share(view, num_tokens, self._group, keepers)
        else:
            share = striped_share(view, num_tokens, self._group, transfer)
        self.shares.append(share)
        for segment in share.writes:
            self.free[segment.instance_id] -= len(segment.positions)
        self._count_striped(view, num_tokens, transfer, held)
        return num_tokens

    def keepers(self, view: RequestView, num_tokens: int, by_ring: int) -> dict[InstanceId, int]:
        """The instances that are to keep a chunk, and their room; none if it is to stay where it is made."""
        held, num_new = view.placement.instance_ids, view.num_uncomputed_tokens
        if by_ring >= num_new and len(held) <= 1:
            roomy = [i for i in held or self.instance_ids if self.free[i] > num_new]
            if roomy:
                keeper_id = max(roomy, key=lambda i: (self.free[i], -i))
                return {keeper_id: self.free[keeper_id]}
        if min(num_tokens, num_new) > self.dop * min(self.free.values()):
            return {i: slots for i, slots in self.free.items() if slots}
        return {}

    @property
    def _group(self) -> ESPGroup:
        return ESPGroup(self.instance_ids)

    def begin_prompts(self) -> None:
        """Reckon what the decodes added take, before the first prompt."""
        for instance_id, work in self.works.items():
            self._reckon(instance_id, work)

    def is_full(self, budget: float) -> bool:
        """Whether no instance has time left for a chunk that is worth it."""
        return min(self.used.values()) + self.wide.overhead > (1 - LEAST_PART) * budget

    def num_fitting(self, instance_id: InstanceId, num_cached: int, budget: float) -> int:
        """New tokens on `num_cached` that one instance computes within a step of `budget`."""
        slope = self.alone.per_token + self.alone.per_cached_pair * num_cached
        return self._largest(instance_id, slope, self.alone.per_new_pair, budget)

    def plan(self, num_steps: int = 1) -> BatchPlan:
        """The batch, on the instances that have a part in it."""
        parts = {i for share in self.shares for i in share.instance_ids}
        holders = {i for i, work in self.works.items() if work.num_attends}
        group = ESPGroup(tuple(i for i in self.instance_ids if i in parts or i in holders))
        return batch_of(group, self.shares, num_steps, self.seconds)

    def _reckon(self, instance_id: InstanceId, work: InstanceWork) -> None:
        self.used[instance_id] = max(self.alone.floor, self.cost_model.instance_time(work))

    def _largest(self, instance_id: InstanceId, slope: float, square: float, budget: float) -> int:
        """The largest n with slope n + square n^2 within what an instance has left of a step of `budget`."""
        left = budget - self.wide.overhead - self.used[instance_id]
        num_tokens = 0
        if left > LEAST_PART * budget:
            num_tokens = int(2 * left / (slope + sqrt(slope * slope + 4 * square * left)))
        room = self.max_tokens - self.works[instance_id].num_tokens
        return max(self.min_tokens, min(num_tokens, room))

    def _num_exchanged(self, held: Mapping[InstanceId, int], budget: float) -> int:
        """The tokens that all can compute if queries travel: an instance attends all to what it holds."""
        token, pair = self.wide.per_token, self.alone.per_cached_pair
        return min(
            self._largest(i, token + pair * held.get(i, 0), self.wide.per_new_pair, budget)
            for i in self.instance_ids
        )

    def _num_ringed(self, num_cached: int, budget: float) -> int:
        """The tokens that all can compute if KV travels: an instance attends its stripe to everything."""
        slope = self.alone.per_token / self.dop + self.wide.per_cached_pair * num_cached
        busiest = max(self.used, key=self.used.__getitem__)
        num_tokens = self._largest(busiest, slope, self.wide.per_new_pair, budget)
        if num_tokens <= 0:
            return 0
        stripe = num_tokens / self.dop
        work = InstanceWork(
            num_pairs=stripe * (num_cached + num_tokens / 2),
            num_ring_keys=round((num_cached + num_tokens) * (1 - 1 / self.dop)),
        )
        hidden = InstanceWork(num_pairs=work.num_pairs)
        exposed = self.cost_model.instance_time(work) - self.cost_model.instance_time(hidden)
        return int(num_tokens * max(0.0, 1 - exposed / budget))

    def _count_striped(
        self, view: RequestView, num_tokens: int, transfer: Transfer, held: Mapping[InstanceId, int]
    ) -> None:
        stripe, num_cached = num_tokens / self.dop, view.num_computed_tokens
        for instance_id in self.instance_ids:
            work = self.works[instance_id]
            if transfer is Transfer.KV:
                self._add_work(instance_id, stripe, stripe * (num_cached + num_tokens / 2))
                work.num_ring_keys += round(num_tokens - stripe + num_cached - held.get(instance_id, 0))
                self.has_ring = True
            else:
                pairs = num_tokens * (held.get(instance_id, 0) + stripe / 2)
                self._add_work(instance_id, stripe, pairs)
                work.num_sent_queries += round(stripe * (self.dop - 1))
                self.has_exchange = True
            self._reckon(instance_id, work)

    def _add_work(self, instance_id: InstanceId, num_tokens: float, num_pairs: float) -> None:
        work = self.works[instance_id]
        work.num_tokens += round(num_tokens)
        work.num_blocks += 1
        work.num_attends += 1
        work.num_pairs += num_pairs


def choose_masters(
    views: Sequence[RequestView], free: Mapping[InstanceId, int], num_steps: int
) -> list[tuple[RequestView, InstanceId]] | None:
    """A master with room for `num_steps` tokens for each decoding request; None if there is none for one.

    Instances that hold KV of the request already come first, which keeps groups small; then those that are
    master of fewer.
    """
    room = dict(free)
    if len(room) == 1:
        (only_id,) = room
        fits = sum(min(num_steps, view.num_remaining_tokens) for view in views) <= room[only_id]
        return [(view, only_id) for view in views] if fits else None
    num_requests = dict.fromkeys(room, 0)
    masters = []
    for view in views:
        num_tokens = min(num_steps, view.num_remaining_tokens)
        master_id = _best_master(
            [i for i in view.placement.instance_ids if room[i] >= num_tokens], room, num_requests
        )
        if master_id is None:
            master_id = _best_master([i for i in room if room[i] >= num_tokens], room, num_requests)
        if master_id is None:
            return None
        masters.append((view, master_id))
        room[master_id] -= num_tokens
        num_requests[master_id] += 1
    return masters


def _best_master(
    candidates: Sequence[InstanceId], room: Mapping[InstanceId, int], num_requests: Mapping[InstanceId, int]
) -> InstanceId | None:
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    return min(candidates, key=lambda i: (num_requests[i], -room[i], i))
