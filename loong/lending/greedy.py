"""Algorithm 1 of Infinite-LLM: which debtor moves how many blocks of its longest request to which creditor.

Debtors have small batches, creditors use little memory. Debtors are taken by ascending batch size. For each,
creditors are taken by ascending memory use, which is sorted again after each move. It goes on until no number
of blocks makes the pair produce more tokens in a second. Throughput is that of equations (5) to (7), which
have no communication. Equation (4) counts all placements: too many to try.

The paper leaves open, and here it is so:
- An instance that is below both thresholds is what it is already, or becomes first; it is never both.
- The batch of a debtor grows by the requests that wait, in their order, in the room that it frees: the last
  in part, since several creditors together may free the rest.
- Between two numbers of blocks with which one more request fits, throughput is nearly linear. So these
  are tried, up to `MAX_OPTIONS` of them, and the most that hide behind local attention (figure 6a).
"""

from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from loong.core.placement import InstanceId
from loong.core.request import RequestId

MAX_OPTIONS = 16  # numbers of blocks that are tried for a debtor and a creditor


class DecodeModel(Protocol):
    """Predicted times of the decode steps of one instance."""

    def seconds(self, batch_size: int, num_blocks: int, /) -> float:
        """Return the seconds of a step that reads this many blocks: equation (5), all layers together."""
        ...

    def is_hidden(self, batch_size: int, num_local: int, num_remote: int, /) -> bool:
        """Return whether a creditor's answer for `num_remote` blocks comes while the local ones are read."""
        ...


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The empirical ones: the largest batch of a debtor, and a creditor's largest share of memory in use."""

    batch_size: float
    memory_share: float


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """The load of an instance. Sizes are blocks.

    A step reads `num_keys`, those kept for others included. `num_room` are free and promised to nobody.
    `longest_id` is its request with most blocks here, `num_longest` of which could move; None if none can.
    `lent` are the blocks of its requests on each other instance, and `num_hosted` those here of others.
    """

    instance_id: InstanceId
    batch_size: int
    num_keys: int
    num_room: int
    num_used: int
    capacity: int
    longest_id: RequestId | None = None
    num_longest: int = 0
    lent: Mapping[InstanceId, int] = field(default_factory=dict)
    num_hosted: int = 0

    @property
    def memory_share(self) -> float:
        """Return the share of its memory in use."""
        return self.num_used / self.capacity if self.capacity else 1.0

    @property
    def is_debtor(self) -> bool:
        """Return whether others keep KV for it."""
        return any(self.lent.values())

    @property
    def is_creditor(self) -> bool:
        """Return whether it keeps KV of others."""
        return self.num_hosted > 0

    def lending_to(self, creditor_id: InstanceId, num_blocks: int) -> "InstanceLoad":
        """Return it with this many more blocks of its longest request at a creditor; fewer if below 0."""
        lent = {**self.lent, creditor_id: self.lent.get(creditor_id, 0) + num_blocks}
        return replace(
            self,
            num_keys=self.num_keys - num_blocks,
            num_room=self.num_room + num_blocks,
            num_used=self.num_used - num_blocks,
            num_longest=self.num_longest - num_blocks,
            lent=lent,
        )

    def hosting(self, num_blocks: int) -> "InstanceLoad":
        """Return it with this many more blocks of others; fewer if below 0."""
        return replace(
            self,
            num_keys=self.num_keys + num_blocks,
            num_room=self.num_room - num_blocks,
            num_used=self.num_used + num_blocks,
            num_hosted=self.num_hosted + num_blocks,
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """Blocks of a request that are to move: the pair is predicted to make `rate` tokens/s, not `was`."""

    request_id: RequestId
    num_blocks: int
    debtor_id: InstanceId
    creditor_id: InstanceId
    was: float
    rate: float


def propose(
    loads: Sequence[InstanceLoad], waiting: Sequence[int], model: DecodeModel, thresholds: Thresholds
) -> list[Proposal]:
    """Return the moves of one round; `waiting` are the blocks of the requests that wait, in their order."""
    by_id, proposals = {load.instance_id: load for load in loads}, list[Proposal]()
    stops: Sequence[int] = list(accumulate(waiting))
    debtors = [load for load in loads if load.batch_size <= thresholds.batch_size]
    for first in sorted(debtors, key=lambda load: (load.batch_size, load.instance_id)):
        tried = {first.instance_id}
        while True:
            debtor = by_id[first.instance_id]
            creditor = _next_creditor(by_id.values(), tried, thresholds)
            if creditor is None or debtor.is_creditor or debtor.longest_id is None:
                break
            found = _best(debtor, creditor, stops, model)
            if found is None:
                break
            proposals.append(found)
            tried.add(creditor.instance_id)
            by_id[debtor.instance_id] = debtor.lending_to(creditor.instance_id, found.num_blocks)
            by_id[creditor.instance_id] = creditor.hosting(found.num_blocks)
        if len(tried) > 1:
            stops = _left(by_id[first.instance_id].num_room, stops)
    return proposals


def is_return_better(
    debtor: InstanceLoad, creditor: InstanceLoad, num_blocks: int, model: DecodeModel
) -> bool:
    """Return whether the pair makes no fewer tokens a second once a debtor has its blocks back.

    The paper has debtors take back KV as soon as they have room. Without this, blocks that Algorithm 1 moves
    away from an instance with room would go to and fro.
    """
    back = debtor.lending_to(creditor.instance_id, -num_blocks), creditor.hosting(-num_blocks)
    return pair_rate(*back, (), model) >= pair_rate(debtor, creditor, (), model)


def pair_rate(
    debtor: InstanceLoad, creditor: InstanceLoad, waiting: Sequence[int], model: DecodeModel
) -> float:
    """Return the tokens a second of a pair, equation (7); requests that wait join the debtor in its room.

    `waiting` are the blocks of the first request, of the first two, and so on.
    """
    num_joining = bisect_right(waiting, max(0, debtor.num_room))
    num_blocks, share = waiting[num_joining - 1] if num_joining else 0, 0.0
    if num_joining < len(waiting) and (num_left := debtor.num_room - num_blocks) > 0:
        share = num_left / (waiting[num_joining] - num_blocks)
        num_blocks = debtor.num_room
    rate = 0.0
    if batch_size := debtor.batch_size + num_joining + (share > 0):
        num_requests = debtor.batch_size + num_joining + share
        rate = num_requests / model.seconds(batch_size, debtor.num_keys + num_blocks)
    if creditor.batch_size:
        rate += creditor.batch_size / model.seconds(creditor.batch_size, creditor.num_keys)
    return rate


def num_hidden(debtor: InstanceLoad, creditor_id: InstanceId, most: int, model: DecodeModel) -> int:
    """Return the most blocks, up to `most`, that may go to a creditor (figure 6a).

    All that its creditors then read hides behind what stays.
    """
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        moved = debtor.lending_to(creditor_id, middle)
        num_remote = max(moved.lent.values())
        if model.is_hidden(moved.batch_size, moved.num_keys, num_remote):
            low = middle
        else:
            high = middle - 1
    return low


def _next_creditor(
    loads: Iterable[InstanceLoad], tried: Container[InstanceId], thresholds: Thresholds
) -> InstanceLoad | None:
    able = [
        load
        for load in loads
        if load.instance_id not in tried
        and load.memory_share <= thresholds.memory_share
        and not load.is_debtor
        and load.num_room > 0
    ]
    return min(able, key=lambda load: (load.memory_share, load.instance_id), default=None)


def _best(
    debtor: InstanceLoad, creditor: InstanceLoad, waiting: Sequence[int], model: DecodeModel
) -> Proposal | None:
    """Return the number of blocks with the highest rate; None if moving nothing is as good."""
    assert debtor.longest_id is not None
    most = max(0, min(debtor.num_longest, creditor.num_room))
    most = num_hidden(debtor, creditor.instance_id, most, model)
    was = best = pair_rate(debtor, creditor, waiting, model)
    num_best = 0
    for num_blocks in _options(debtor, waiting, most):
        moved = debtor.lending_to(creditor.instance_id, num_blocks), creditor.hosting(num_blocks)
        if (rate := pair_rate(*moved, waiting, model)) > best:
            best, num_best = rate, num_blocks
    if not num_best:
        return None
    return Proposal(debtor.longest_id, num_best, debtor.instance_id, creditor.instance_id, was, best)


def _options(debtor: InstanceLoad, waiting: Sequence[int], most: int) -> list[int]:
    """Return the numbers of blocks to try: those with which one more request fits, and the most."""
    first = bisect_right(waiting, debtor.num_room)
    last = bisect_right(waiting, debtor.num_room + most)
    every = -(-(last - first) // MAX_OPTIONS) or 1
    return [*(stop - debtor.num_room for stop in waiting[first:last:every]), *([most] if most else [])]


def _left(num_room: int, waiting: Sequence[int]) -> Sequence[int]:
    """Return the requests that still wait once those in front have filled some room."""
    num_joining = bisect_right(waiting, max(0, num_room))
    num_blocks = waiting[num_joining - 1] if num_joining else 0
    return [stop - num_blocks for stop in waiting[num_joining:]]
