"""One step in the making: requests are added to a group until its time, its tokens or its room is used up."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from operator import attrgetter
from typing import NamedTuple

from loong.core.cost_model import CostModel, PrefillTerms
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, striped
from loong.core.plan import BatchPlan, Transfer
from loong.core.request import RequestView
from loong.core.work import InstanceWork, StepWork, WorkCount
from loong.scheduler.masters import num_stored
from loong.scheduler.striping import (
    RequestPart,
    batch_of,
    decode_part,
    retained_part,
    striped_part,
    whole_part,
)

LEAST_PART = 0.05  # of a step: a chunk that takes less is not worth its overhead


@dataclass(slots=True)
class StepBuilder:
    """A batch for `instance_ids`. `free` is their free slots, which what is added uses up.

    An instance computes at most `max_tokens`, and at least `min_tokens` of a prompt, however long that takes.
    A step that begins a lease of `num_steps` has decodes alone.
    """

    instance_ids: tuple[InstanceId, ...]
    free: dict[InstanceId, int]
    cost_model: CostModel
    max_tokens: int
    num_steps: int = 1
    min_tokens: int = 0
    decodes: list[tuple[RequestView, InstanceId]] = field(default_factory=list)  # with their masters
    parts: list[RequestPart] = field(default_factory=list)  # of prompts
    count: WorkCount = field(init=False)
    ring: ESPGroup = field(init=False)  # all its instances
    alone: PrefillTerms = field(init=False)
    wide: PrefillTerms = field(init=False)
    overhead: float = 0.0  # seconds, of the group
    used: dict[InstanceId, float] = field(default_factory=dict)  # seconds, of each instance by itself
    _overheads: dict[tuple[bool, bool, bool], float] = field(default_factory=dict)  # computed before

    def __post_init__(self) -> None:
        self.count = WorkCount(self.instance_ids, is_lease=self.num_steps > 1)
        self.ring = ESPGroup(self.instance_ids)
        self.alone = self.cost_model.prefill_terms(1)
        self.wide = self.cost_model.prefill_terms(self.dop) if self.dop > 1 else self.alone

    @property
    def dop(self) -> int:
        """The number of its instances."""
        return len(self.instance_ids)

    @property
    def group(self) -> ESPGroup:
        """The instances that have a part in it."""
        if self.count.has_ring or self.dop == 1:
            return self.ring
        having = tuple(i for i in self.instance_ids if self.count.instances[i].num_attends)
        return ESPGroup(having) if having else self.ring

    @property
    def seconds(self) -> float:
        """Predicted; of a lease, each step but its first, with which it is sent to the group."""
        return self.cost_model.step_time(self.count.step(self.group, is_first=self.num_steps == 1))

    @property
    def prompt_speed(self) -> float:
        """Tokens of prompts that it computes in a second."""
        return sum(part.num_tokens for part in self.parts) / self.seconds

    def plan(self) -> BatchPlan:
        """The batch."""
        parts = [decode_part(view, master_id, self.num_steps) for view, master_id in self.decodes]
        return batch_of(self.group, parts + self.parts, self.num_steps, self.seconds)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not (self.decodes or self.parts)

    def add_decodes(self, masters: Sequence[tuple[RequestView, InstanceId]]) -> None:
        """One token a step of each request, at its master."""
        self.decodes += masters
        if self.dop == 1:
            (only_id,) = self.instance_ids
            self.free[only_id] -= num_stored([view for view, _ in masters], self.num_steps)
            self.count.add_lone_decodes([view.placement for view, _ in masters])
            return
        for view, master_id in masters:
            self.free[master_id] -= min(self.num_steps, view.num_remaining_tokens)
            self.count.add_decode(master_id, view.placement)

    def shorten(self, num_steps: int) -> None:
        """Let the lease have no more steps than that."""
        self.num_steps = min(self.num_steps, num_steps)
        self.count.is_lease = self.num_steps > 1

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
            self._add(view, whole_part(view, num_tokens, master_id))
            self.update_costs()
        return num_tokens

    def add_striped(self, view: RequestView, budget: float) -> int:
        """As much of a prompt as all instances compute within a step of `budget`, in stripes.

        They travel by the way that computes more; of two that compute as many by the ring if their KV then
        stays on one instance, or else by the sooner one. Where KV goes round the ring in the last chunk of a
        prompt that has all its KV on one instance, or none yet, it stays on that instance, so that the group
        is free again; so it does in the chunks before, if its decode is no slower for that. Other chunks stay
        where they are made. Where not all have room for that, either those that have compute alone, though
        all attend to their queries, or all compute, and KV goes round the ring to where room is. Returns the
        number of tokens.
        """
        held = view.placement.tokens_by_instance()
        part = self._sooner(view, self._ringed(view, held, budget), self._exchanged(view, held, budget))
        if part is None:
            return 0
        self._add(view, part)
        self.update_costs()
        return part.num_tokens

    def _sooner(
        self, view: RequestView, ringed: RequestPart | None, exchanged: RequestPart | None
    ) -> RequestPart | None:
        """The way that computes more of a prompt, or as much to be kept on one instance, or in less time."""
        if ringed is None or exchanged is None:
            return ringed or exchanged
        if ringed.num_tokens != exchanged.num_tokens:
            return max(ringed, exchanged, key=attrgetter("num_tokens"))
        if len({segment.instance_id for segment in ringed.writes}) == 1:
            return ringed
        return min(ringed, exchanged, key=lambda part: self._seconds_with(view, part))

    def _seconds_with(self, view: RequestView, part: RequestPart) -> float:
        count = self.count.copy()
        count.add(part.queries, part.writes, view.placement)
        return self.cost_model.step_time(count.step(self.ring))

    def _ringed(self, view: RequestView, held: Mapping[InstanceId, int], budget: float) -> RequestPart | None:
        """A chunk in stripes of all instances whose KV travels, and stays where it is wanted, or has room."""
        num_tokens = min(self._num_ringed(held, budget), view.num_uncomputed_tokens)
        if not num_tokens:
            return None
        keepers = self._keeper(view, num_tokens) or self._roomiest(num_tokens)
        if len(keepers) * min(keepers.values()) < num_tokens:
            keepers = {i: slots for i, slots in self.free.items() if slots}
        num_tokens = _even(view, min(num_tokens, sum(keepers.values())), len(keepers))
        return retained_part(view, num_tokens, self.ring, keepers) if num_tokens else None

    def _exchanged(
        self, view: RequestView, held: Mapping[InstanceId, int], budget: float
    ) -> RequestPart | None:
        """A chunk in stripes of those that have room, which send their queries."""
        num_tokens = min(self._num_exchanged(held, budget, self.instance_ids), view.num_uncomputed_tokens)
        if not num_tokens:
            return None
        makers = self._roomiest(num_tokens)
        room = len(makers) * min(makers.values())
        if len(makers) < self.dop or room < num_tokens:
            num_tokens = min(num_tokens, room, self._num_exchanged(held, budget, tuple(makers)))
        num_tokens = _even(view, num_tokens, len(makers))
        ring = ESPGroup(tuple(makers))
        return striped_part(view, num_tokens, ring, Transfer.QUERY) if num_tokens else None

    def _keeper(self, view: RequestView, by_ring: int) -> dict[InstanceId, int]:
        """The one instance that is to keep all of a prompt, and its room; none if there is no such one."""
        held, num_new = view.placement.instance_ids, view.num_uncomputed_tokens
        if len(held) <= 1 and self.is_kept_whole(view, by_ring):
            roomy = [i for i in held or self.instance_ids if self.free[i] > num_new]
            if roomy:
                keeper_id = max(roomy, key=lambda i: (self.free[i], -i))
                return {keeper_id: self.free[keeper_id]}
        return {}

    def is_kept_whole(self, view: RequestView, by_ring: int) -> bool:
        """Whether one instance keeps all of a prompt: by its last chunk, or as its decode is no slower so."""
        if by_ring >= view.num_uncomputed_tokens:
            return True
        whole, spread = (
            self._decode_seconds(view, ids) for ids in (self.instance_ids[:1], self.instance_ids)
        )
        return whole <= spread

    def _decode_seconds(self, view: RequestView, instance_ids: tuple[InstanceId, ...]) -> float:
        count = WorkCount(instance_ids)
        placement = striped(view.request_id, range(view.num_known_tokens), instance_ids)
        count.add_decode(instance_ids[0], placement)
        return self.cost_model.step_time(count.step(ESPGroup(instance_ids)))

    def _roomiest(self, num_tokens: int) -> dict[InstanceId, int]:
        """As many instances as have room for equal parts of so many tokens, or of the most, in ring order."""
        roomy = sorted(self.instance_ids, key=lambda i: (-self.free[i], i))
        parts = (n * self.free[roomy[n - 1]] for n in range(1, self.dop + 1))
        _, number = max((min(num_tokens, room), n) for n, room in enumerate(parts, start=1))
        chosen = roomy[:number]
        return {i: self.free[i] for i in self.instance_ids if i in chosen}

    def update_costs(self) -> None:
        """See what all that was added takes; before each prompt."""
        work = self.count.step(self.ring)
        self.used = {i: self.cost_model.instance_time(part) for i, part in work.instances.items()}
        overhead = self.cost_model.step_time(work) - max(self.used.values())
        self.overhead = max(overhead, self._overhead_with_chunk())
        for instance_id, seconds in self.used.items():
            self.used[instance_id] = max(seconds, self.alone.floor)  # the first token costs no less

    def is_full(self, budget: float) -> bool:
        """Whether no instance has time left for a chunk that is worth it."""
        return min(self.used.values()) + self.overhead > (1 - LEAST_PART) * budget

    def num_fitting(self, instance_id: InstanceId, num_cached: int, budget: float) -> int:
        """New tokens on `num_cached` that one instance computes within a step of `budget`."""
        slope = self.alone.per_token + self.alone.per_cached_pair * num_cached
        left, least = budget - self.overhead, InstanceWork(num_keys=num_cached)
        square, left_here = self.alone.per_new_pair, left - self.used[instance_id]
        num_tokens = self._largest(instance_id, (slope, square), least, left, dop=1)
        if num_tokens <= self.min_tokens:
            return num_tokens
        taken = self._seconds_of_chunk(instance_id, num_cached, num_tokens)
        if taken <= left_here:
            return num_tokens
        steeper = slope * taken / left_here  # a captured step takes longer to meet a history
        return self._largest(instance_id, (steeper, square), least, left, dop=1)

    def _seconds_of_chunk(self, instance_id: InstanceId, num_cached: int, num_tokens: int) -> float:
        """What an instance takes longer with so many new tokens on `num_cached`, all its own."""
        work = self.count.instances[instance_id].copy()
        work.num_tokens += num_tokens
        work.num_blocks += 1
        work.num_prompt_blocks += 1
        work.num_keys += num_cached + num_tokens
        work.num_pairs += num_tokens * (num_cached + num_tokens / 2)
        work.num_part_pairs += num_tokens * num_cached
        return self.cost_model.instance_time(work) - self.used[instance_id]

    def _largest(
        self,
        instance_id: InstanceId,
        curve: tuple[float, float],
        least: InstanceWork,
        seconds: float,
        dop: int,
    ) -> int:
        """The largest n with curve[0] n + curve[1] n^2 within what an instance has left of `seconds`.

        It computes n / dop of them; however few, it reads the keys of `least`, and starts the kernels.
        """
        in_step, count = seconds - self.wide.per_prompt, self.count.instances[instance_id]
        left, enough = in_step - self.used[instance_id], LEAST_PART * seconds
        if left <= enough or (left := left - self.cost_model.instance_time(least)) <= enough:
            return self.min_tokens
        beside = least.copy()
        beside.num_blocks += not least.num_hops
        beside.num_decode_keys = min(1, count.num_decode_keys)
        beside.num_hops = max(least.num_hops, count.num_hops)
        if in_step < self._least(beside):
            return self.min_tokens
        slope, square = curve
        num_tokens = int(2 * left / (slope + sqrt(slope * slope + 4 * square * left)))
        return max(self.min_tokens, min(num_tokens, dop * (self.max_tokens - count.num_tokens)))

    def _num_exchanged(
        self, held: Mapping[InstanceId, int], budget: float, makers: tuple[InstanceId, ...]
    ) -> int:
        """The tokens that `makers` can compute if queries travel: each attends all to what it holds."""
        each = self.dop / len(makers)  # makes so many stripes of those that all would make
        token, square = each * self.wide.per_token, each * self.wide.per_new_pair
        pair, left = self.dop * self.wide.per_cached_pair, budget - self._exchange_overhead
        num_tokens, asked = self.dop * self.max_tokens, list[_Load]()
        for instance_id in sorted(self.instance_ids, key=self.used.__getitem__, reverse=True):
            num_keys, is_maker = held.get(instance_id, 0), instance_id in makers
            count = self.count.instances[instance_id]
            load = _Load(is_maker, count.num_decode_keys > 0, num_keys, count.num_tokens)
            if not (is_maker or pair * num_keys) or any(map(load.is_no_more_than, asked)):
                continue  # it does nothing, or no more than one that is as busy
            asked.append(load)
            least = InstanceWork(num_keys=num_keys, num_sent_queries=int(is_maker))
            curve = token * is_maker + pair * num_keys, square * is_maker
            num_tokens = min(num_tokens, self._largest(instance_id, curve, least, left, len(makers)))
            if num_tokens <= self.min_tokens:
                break
        return num_tokens

    def _num_ringed(self, held: Mapping[InstanceId, int], budget: float) -> int:
        """The tokens that all can compute if KV travels: an instance attends its stripe to everything.

        What of the ring attention does not hide takes time too, most where least is held; and where most is,
        it is known whether the step is captured.
        """
        num_cached = sum(held.values())
        slope = self.alone.per_token / self.dop + self.wide.per_cached_pair * num_cached
        busiest = max(self.used, key=self.used.__getitem__)
        left = budget - self._ring_overhead
        most = self._largest(busiest, (slope, self.wide.per_new_pair), self._least_ring(held), left, self.dop)
        if most <= self.min_tokens:
            return self.min_tokens
        by_held = sorted(self.instance_ids, key=lambda i: held.get(i, 0))
        joining = [self._joining_ring(i, held) for i in {busiest, by_held[0], by_held[-1]}]

        def seconds(num_tokens: int) -> float:
            works = (self._with_stripe(work, num_cached, num_tokens) for work in joining)
            return max(map(self.cost_model.instance_time, works))

        left -= self.wide.per_prompt
        return max(self.min_tokens, bisect_right(range(most + 1), left, key=seconds) - 1)

    def _joining_ring(self, instance_id: InstanceId, held: Mapping[InstanceId, int]) -> InstanceWork:
        """What an instance would do with the history of a prompt too, if its KV travels."""
        work, num_cached = self.count.instances[instance_id].copy(), sum(held.values())
        work.num_ring_blocks += 1
        # One decides for all whether it is captured.
        work.num_blocks = work.num_ring_blocks + self._num_staying
        work.num_keys += num_cached
        work.num_ring_keys += num_cached - held.get(instance_id, 0)
        work.num_hops = self.dop - 1
        return work

    def _with_stripe(self, joining: InstanceWork, num_cached: int, num_tokens: int) -> InstanceWork:
        """And with its stripe of so many tokens of it."""
        work, stripe = joining.copy(), num_tokens / self.dop
        num_pairs = stripe * (num_cached + num_tokens / 2)
        work.num_tokens += ceil(stripe)
        work.num_keys += num_tokens
        work.num_pairs += num_pairs
        work.num_part_pairs += num_pairs - stripe * stripe / 2
        work.num_ring_keys += int(num_tokens - stripe)
        return work

    @property
    def _num_staying(self) -> int:
        """Query blocks to which no KV travels, decodes among them."""
        return sum(work.num_blocks - work.num_ring_blocks for work in self.count.instances.values())

    def _least_ring(self, held: Mapping[InstanceId, int]) -> InstanceWork:
        """Of whoever holds most: what a prompt's history is to it, if that travels."""
        num_cached = sum(held.values())
        return InstanceWork(
            num_blocks=self._num_staying,
            num_keys=num_cached,
            num_ring_keys=num_cached - max(held.values(), default=0),
            num_hops=self.dop - 1,
        )

    def least_seconds(self, view: RequestView) -> float:
        """Of a step without decodes and with a chunk of a prompt, however short, that goes the best way."""
        held = view.placement.tokens_by_instance()
        ways = []
        if self.dop == 1 or len(held) <= 1:
            ways.append(self.overhead + self._least(InstanceWork(num_keys=sum(held.values()))))
        if self.dop > 1:
            ways += [self._least_exchange_seconds(held), self._least_ring_seconds(held)]
        return min(ways)

    @property
    def begun_seconds(self) -> float:
        """What it takes as it is, with the first token of another prompt."""
        return self.overhead + max(self.used.values())

    def reading_seconds(self, view: RequestView) -> float:
        """What a chunk of a prompt takes, however short, to read the history."""
        held = view.placement.tokens_by_instance()
        return self.cost_model.instance_time(InstanceWork(num_keys=max(held.values(), default=0)))

    def _least_exchange_seconds(self, held: Mapping[InstanceId, int]) -> float:
        num_keys = max(held.values(), default=0)
        return self._exchange_overhead + self._least(InstanceWork(num_keys=num_keys, num_sent_queries=1))

    def _least_ring_seconds(self, held: Mapping[InstanceId, int]) -> float:
        return self._ring_overhead + self._least(self._least_ring(held))

    def _least(self, work: InstanceWork) -> float:
        """Seconds that an instance takes to compute a token of a prompt, and all that it reads and starts."""
        first = work.copy()
        first.num_tokens = 1
        first.num_keys += 1
        return self.cost_model.instance_time(first)

    @property
    def _exchange_overhead(self) -> float:
        """Seconds of the group in a step in which queries travel."""
        return max(self.overhead, self._overhead_with_chunk(has_exchange=True))

    @property
    def _ring_overhead(self) -> float:
        """Seconds of the group in a step in which KV travels."""
        return max(self.overhead, self._overhead_with_chunk(has_ring=True))

    def _overhead_with_chunk(self, *, has_ring: bool = False, has_exchange: bool = False) -> float:
        """Seconds of the group in a step of prompts beside what decodes it has."""
        case = has_ring, has_exchange, bool(self.decodes)
        if case not in self._overheads:
            work = InstanceWork(num_keys=1, num_decode_keys=int(bool(self.decodes)))
            works = dict.fromkeys(self.instance_ids, work)
            seconds = self.cost_model.step_time(StepWork(self.ring, works, has_ring, has_exchange))
            self._overheads[case] = seconds - self.cost_model.instance_time(work)
        return self._overheads[case]

    def _add(self, view: RequestView, part: RequestPart) -> None:
        self.parts.append(part)
        for segment in part.writes:
            self.free[segment.instance_id] -= len(segment.positions)
        self.count.add(part.queries, part.writes, view.placement)


class _Load(NamedTuple):
    """What decides, beside the time it has left, how much of a prompt an instance has time for."""

    is_maker: bool
    has_decodes: bool
    num_keys: int
    num_tokens: int

    def is_no_more_than(self, other: "_Load") -> bool:
        """Whether the other does as much of the same kinds; kinds are corrected apart."""
        kinds_are_alike = self[:2] == other[:2]
        return kinds_are_alike and self.num_keys <= other.num_keys and self.num_tokens <= other.num_tokens


def _even(view: RequestView, num_tokens: int, num_parts: int) -> int:
    """So many tokens or a few less, so that the next chunk goes on in the same stripes, if there is one."""
    is_cut = num_parts < num_tokens < view.num_uncomputed_tokens
    return num_tokens - num_tokens % num_parts if is_cut else num_tokens
