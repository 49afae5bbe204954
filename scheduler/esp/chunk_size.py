"""The next chunk of a prompt: the largest part of it that a step has time and room for.

The cost model is the only description of a step's time. The largest chunk within a budget is found by
predicting the whole step with chunks of several sizes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import StepWork, WorkCount
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.plan import Transfer
from loong.core.request import RequestView
from loong.scheduler.common.striping import RequestPart, retained_part, striped_part
from loong.scheduler.tuning import CHUNK_TOLERANCE, MAX_CHUNK_GUESSES, MIN_CHUNK_SHARE

LEAST_TOKENS = 2  # of the smallest chunk that is tried: one token alone counts as a decode


class _Way(NamedTuple):
    """One way to compute a prompt's chunk of any number of tokens."""

    part_of: Callable[[int], RequestPart]
    most_tokens: int


def largest_within(seconds: Callable[[int], float], most: int, budget: float) -> int:
    """Return the largest number of tokens up to `most` whose step takes at most `budget` seconds.

    `seconds` gives the time of a step with that many tokens and should grow with them. The search
    (regula falsi, Illinois variant) ends within `CHUNK_TOLERANCE` of the budget. Returns 0 if `LEAST_TOKENS`
    take longer.
    """
    if most <= 0 or (excess := seconds(most) - budget) <= 0:
        return max(most, 0)
    fitting, too_many = min(LEAST_TOKENS, most), most
    spare = left = budget - seconds(fitting)
    if left < 0:
        return 0
    for _ in range(MAX_CHUNK_GUESSES):
        if left <= CHUNK_TOLERANCE * budget or too_many - fitting <= 1:
            break
        guess = fitting + int((too_many - fitting) * spare / (spare + excess))
        guess = min(max(guess, fitting + 1), too_many - 1)
        guessed_left = budget - seconds(guess)
        if guessed_left >= 0:
            fitting, spare, left = guess, guessed_left, guessed_left
            excess /= 2
        else:
            too_many, excess = guess, -guessed_left
            spare /= 2
    return fitting


@dataclass(frozen=True, slots=True)
class ChunkSizer:
    """Sizes chunks for one step of `ring`. Changes nothing.

    `count` is the work that the step has already and `free` the slots that are left. An instance computes at
    most `max_tokens` tokens in the step.
    """

    ring: ESPGroup
    free: Mapping[InstanceId, int]
    count: WorkCount
    cost_model: CostModel
    max_tokens: int

    def seconds_with(self, view: RequestView, part: RequestPart) -> float:
        """Return the predicted time of the step with `part` of a request added."""
        return self.cost_model.step_time(self._step_with(view, part, self.ring))

    def whole(
        self,
        view: RequestView,
        master_id: InstanceId,
        budget: float,
        min_tokens: int = 0,
        at_least: int = 0,
    ) -> RequestPart | None:
        """Return the largest chunk that one instance computes and stores; None if it has under `at_least`.

        It has at least `min_tokens` tokens where there is room, even if they exceed the budget.
        """
        return self._sized(view, self._by_one(view, master_id), budget, min_tokens, at_least)

    def striped(self, view: RequestView, budget: float, min_tokens: int = 0) -> RequestPart | None:
        """Return the largest chunk that all instances compute together in stripes, or None.

        Either queries travel or KV does, by the ring: whichever allows the larger chunk, or takes less time
        for the same. The KV stays on those that have free slots.

        It has at least `min_tokens` tokens where there is room, even if they exceed the budget.
        """
        ringed = None
        if not self._is_served(view):
            ringed = self._sized(view, self._by_ring(view), budget, min_tokens)
        num_ringed = ringed.num_tokens if ringed is not None else 0
        exchanged = self._sized(view, self._by_exchange(view), budget, min_tokens, num_ringed)
        if ringed is None or exchanged is None:
            return ringed or exchanged
        if ringed.num_tokens != exchanged.num_tokens:
            return ringed if ringed.num_tokens > exchanged.num_tokens else exchanged
        return min(ringed, exchanged, key=partial(self.seconds_with, view))

    def least_seconds(self, view: RequestView) -> float:
        """Return the predicted time of a step with only the smallest chunk of a prompt, by its fastest way.

        Returns 0 where no way has room.
        """
        alone = replace(self, count=WorkCount(self.ring.instance_ids))
        holders = [i for i in view.placement.instance_ids if i in self.ring.instance_ids]
        ways = [alone._by_exchange(view)] if self.ring.dop > 1 else []
        if ways and not self._is_served(view):
            ways.append(alone._by_ring(view))
        if len(holders) <= 1:
            ways.append(alone._by_one(view, (holders or self.ring.instance_ids)[0]))
        parts = (way.part_of(min(way.most_tokens, LEAST_TOKENS)) for way in ways if way.most_tokens)
        return min((alone.seconds_with(view, part) for part in parts), default=0.0)

    def _sized(
        self, view: RequestView, way: _Way, budget: float, min_tokens: int, at_least: int = 0
    ) -> RequestPart | None:
        """Return the largest chunk by one way; None if it would have no token, or fewer than `at_least`.

        The chunk is cut where the instances that take part in it are busy for the whole budget. The time of
        the other instances does not depend on its size.
        """
        if not way.most_tokens or at_least > way.most_tokens:
            return None
        smallest = way.part_of(min(LEAST_TOKENS, way.most_tokens))
        num_tokens = 0
        if self.seconds_with(view, smallest) <= budget:
            seconds = self._busy_seconds(view, way, smallest)
            if at_least and seconds(at_least) > budget:
                return None
            num_tokens = largest_within(seconds, way.most_tokens, budget)
            is_cut_short = seconds(num_tokens) - seconds(smallest.num_tokens) < MIN_CHUNK_SHARE * budget
            if num_tokens < way.most_tokens and is_cut_short:
                num_tokens = 0
        num_tokens = max(num_tokens, min(min_tokens, way.most_tokens))
        if not num_tokens:
            return None
        part = way.part_of(num_tokens)
        num_stripes = len(part.keeper_ids)
        if num_stripes < num_tokens < view.num_uncomputed_tokens and num_tokens % num_stripes:
            return way.part_of(num_tokens - num_tokens % num_stripes)  # the next chunk continues its stripes
        return part

    def _busy_seconds(self, view: RequestView, way: _Way, smallest: RequestPart) -> Callable[[int], float]:
        """Return the time of the step for the instances that take part, by the number of tokens.

        Where others serve the history, that is the time of all.
        """
        if self._is_served(view):
            return cache(lambda num_tokens: self.seconds_with(view, way.part_of(num_tokens)))
        step = self._step_with(view, smallest, self.ring)
        binding = self.cost_model.step_time(step) - max(
            map(self.cost_model.instance_time, step.instances.values())
        )

        @cache
        def seconds(num_tokens: int) -> float:
            part = way.part_of(num_tokens)
            involved = self.ring
            if part.queries[0].transfer is Transfer.QUERY:
                masters = {block.master_id for block in part.queries}
                involved = ESPGroup(tuple(sorted(masters | set(view.placement.instance_ids))))
            works = self._step_with(view, part, involved).instances
            return binding + max(map(self.cost_model.instance_time, works.values()))

        return seconds

    def _is_served(self, view: RequestView) -> bool:
        """Return whether instances outside the group hold some of a prompt's KV: only queries reach that."""
        return not set(self.ring.instance_ids).issuperset(view.placement.instance_ids)

    def _step_with(self, view: RequestView, part: RequestPart, group: ESPGroup) -> StepWork:
        """Return what the instances of `group` do in the step with `part` added."""
        count = self.count.copy(group.instance_ids)
        count.add(part.queries, part.writes, view.placement)
        return count.step(group)

    def _by_one(self, view: RequestView, master_id: InstanceId) -> _Way:
        """Return the way in which one instance computes the chunk and stores it."""
        lone = ESPGroup((master_id,))
        most_tokens = min(view.num_uncomputed_tokens, self._num_room(master_id))
        return _Way(lambda num_tokens: striped_part(view, num_tokens, lone, Transfer.QUERY), most_tokens)

    def _by_exchange(self, view: RequestView) -> _Way:
        """Return the way in which all instances with room compute and store a stripe; queries travel."""
        room = {i: self._num_room(i) for i in self.ring.instance_ids}

        def part_of(num_tokens: int) -> RequestPart:
            makers = ESPGroup(tuple(_roomiest(room, num_tokens)))
            return striped_part(view, num_tokens, makers, Transfer.QUERY)

        roomiest = sorted(room.values(), reverse=True)
        most_tokens = max(number * slots for number, slots in enumerate(roomiest, start=1))
        return _Way(part_of, min(view.num_uncomputed_tokens, most_tokens))

    def _by_ring(self, view: RequestView) -> _Way:
        """Return the way in which all compute a stripe; KV travels, and stays on those with most room."""

        def part_of(num_tokens: int) -> RequestPart:
            keepers = _roomiest(self.free, num_tokens)
            if len(keepers) * min(keepers.values()) < num_tokens:
                keepers = {i: slots for i, slots in self.free.items() if slots}
            return retained_part(view, num_tokens, self.ring, keepers)

        stripe = min(self.max_tokens - self.count.instances[i].num_tokens for i in self.ring.instance_ids)
        return _Way(part_of, min(view.num_uncomputed_tokens, self.ring.dop * stripe, sum(self.free.values())))

    def _num_room(self, instance_id: InstanceId) -> int:
        """Return how many tokens an instance may still compute and store."""
        return min(self.free[instance_id], self.max_tokens - self.count.instances[instance_id].num_tokens)


def _roomiest(room: Mapping[InstanceId, int], num_tokens: int) -> dict[InstanceId, int]:
    """Return the most instances with room for equal parts of `num_tokens`, or of the most that fit."""
    roomiest = sorted(room, key=lambda i: (-room[i], i))
    fitting = (number * room[i] for number, i in enumerate(roomiest, start=1))
    _, number = max((min(num_tokens, slots), number) for number, slots in enumerate(fitting, start=1))
    chosen = roomiest[:number]
    return {i: slots for i, slots in room.items() if i in chosen}
