"""The price of a place for KV of decodes: on the instances of their lease, or on memory instances.

A lease that reads KV on memory instances sends queries there, and waits where they read longer than its own
instances do. In return these read less, and have slots for requests that wait for room. Ways are compared by
the tokens that all decodes of the lease make until they end: while KV moves, as before, then with it moved.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf

from loong.core.cost.cost_model import CostModel
from loong.core.cost.work import InstanceWork, StepWork, step_work
from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.leases import lease_start_time
from loong.scheduler.common.shares import Share, leveled
from loong.scheduler.common.slo_targets import tightest_tpot
from loong.scheduler.config import PolicyConfig
from loong.scheduler.tuning import PLANNED_TPOT_SHARE


@dataclass(frozen=True, slots=True)
class Move:
    """KV of a decode on an instance that is to go to others, some of its tokens to each."""

    view: RequestView
    source_id: InstanceId
    shares: Sequence[Share]

    @property
    def num_tokens(self) -> int:
        """Return all tokens that move."""
        return sum([num_tokens for _, num_tokens in self.shares])


@dataclass(frozen=True, slots=True)
class Priced:
    """Moves that are to be made, with the seconds of a step before and after them."""

    moves: Sequence[Move]
    kept_seconds: float
    moved_seconds: float


@dataclass(frozen=True, slots=True)
class Newcomers:
    """Requests that begin once there is room, and the tokens that each needs on average."""

    number: int
    num_tokens: int


NOBODY = Newcomers(0, 1)


@dataclass(frozen=True)
class LeasePrice:
    """The price of moves for a batch of decodes in flight."""

    batch: RunningBatch
    snapshot: Snapshot
    cost_model: CostModel
    config: PolicyConfig

    @cached_property
    def views(self) -> Sequence[RequestView]:
        """The decodes of the batch that have not ended."""
        views = [self.snapshot.request[request_id] for request_id in self.batch.plan.request_ids]
        return [view for view in views if view.num_output_tokens and not view.has_ended]

    def best(self, moves: Sequence[Move], newcomers: Newcomers = NOBODY) -> Priced | None:
        """Return as many of these moves, from the first on, as make most tokens; None if all make less.

        Instances from which KV moves have room for some of the newcomers then. Decodes have to meet their
        TPOT targets, unless these are missed now, too.
        """
        best, most_gained = None, 0.0
        for number in _numbers(len(moves)):
            some = moves[:number]
            num_tokens = sum([move.num_tokens for move in some])
            num_new = min(newcomers.number, num_tokens // newcomers.num_tokens)
            seconds = self.seconds_after(some, num_new)
            if seconds > max(self._step_seconds, self._budget):
                continue
            gained = self._gained(some, num_tokens, seconds, num_new)
            if gained > most_gained:
                best, most_gained = Priced(some, self._step_seconds, seconds), gained
        return best

    def of(self, moves: Sequence[Move]) -> Priced:
        """Return moves that are made whether or not they pay."""
        return Priced(moves, self._step_seconds, self.seconds_after(moves))

    @cached_property
    def _work(self) -> StepWork:
        placements = {r: self.snapshot.request[r].placement for r in self.batch.plan.request_ids}
        return replace(
            step_work(self.batch.plan, placements, is_first=False),
            read_shares=self._read_shares,
            idle_holder_ids=self._idle_ids,
        )

    @cached_property
    def _step_seconds(self) -> float:
        return self.cost_model.step_time(self._work)

    @cached_property
    def _budget(self) -> float:
        return PLANNED_TPOT_SHARE * tightest_tpot(self.views, self.config)

    @cached_property
    def _idle_ids(self) -> frozenset[InstanceId]:
        return frozenset(i.instance_id for i in self.snapshot.instances if i.batch_id is None)

    @cached_property
    def _read_shares(self) -> Mapping[InstanceId, float]:
        """The shares of time in which memory instances read for other batches."""
        num_keys: Counter[tuple[InstanceId, int]] = Counter()
        for view in self.snapshot.running:
            if view.batch_id is None or view.batch_id == self.batch.batch_id or not view.num_output_tokens:
                continue
            for instance_id, held in view.placement.tokens_by_instance().items():
                if instance_id in self.snapshot.memory_pools and view.batch_id in self.snapshot.batch:
                    num_keys[instance_id, view.batch_id] += held
        shares = dict[InstanceId, float]()
        for (instance_id, batch_id), number in num_keys.items():
            step_seconds = self.snapshot.batch[batch_id].plan.predicted_time or inf
            reading = self.cost_model.served_time(InstanceWork(num_decode_keys=number))
            shares[instance_id] = min(1.0, shares.get(instance_id, 0.0) + reading / step_seconds)
        return shares

    @cached_property
    def _num_steps(self) -> float:
        """The steps that a decode has to come, on average."""
        return sum([view.num_remaining_tokens for view in self.views]) / len(self.views)

    def _gained(self, moves: Sequence[Move], num_tokens: int, seconds: float, num_new: int) -> float:
        """Return the tokens that the batch makes more, in the time that it has, if these moves begin now."""
        number, left = len(self.views), self._num_steps * self._step_seconds
        moving = self._moving_seconds(moves)
        copying = self.cost_model.copying_time(num_tokens)
        starting = lease_start_time(self.batch.plan.group.instance_ids, number, self.cost_model)
        while_moving = number * (moving - copying) / self._step_seconds
        after = (number + num_new) * (left - moving - starting) / seconds
        return while_moving + after - number * self._num_steps if moving + starting < left else 0.0

    def _moving_seconds(self, moves: Sequence[Move]) -> float:
        """Return the seconds of the longest of these moves, of which those of one link follow each other."""
        tokens: Counter[tuple[InstanceId, InstanceId]] = Counter()
        for move in moves:
            for instance_id, num_tokens in move.shares:
                tokens[move.source_id, instance_id] += num_tokens
        return max([self.cost_model.migration_time(n, *link) for link, n in tokens.items()])

    def seconds_after(self, moves: Sequence[Move], num_new: int = 0) -> float:
        """Return the seconds of a step after these moves, with more decodes that read an average context."""
        master_of = {block.request_id: block.master_id for block in self.batch.plan.queries}
        instances = {i: work.copy() for i, work in self._work.instances.items()}
        holders = {i: work.copy() for i, work in self._work.holders.items()}

        def read(view: RequestView, instance_id: InstanceId, num_keys: int, num_parts: int) -> None:
            """Add keys of a view and parts of its KV to an instance, or take them from it."""
            work, master = instances.get(instance_id), instances[master_of[view.request_id]]
            if work is None:
                work = holders.setdefault(instance_id, InstanceWork())
                work.num_sent_queries += num_parts
            work.num_decode_keys += num_keys
            if work is not master:
                work.num_attends += num_parts
                master.num_sent_queries += num_parts

        for move in moves:
            read(move.view, move.source_id, -move.num_tokens, -1)
            for instance_id, num_tokens in move.shares:
                read(move.view, instance_id, num_tokens, 1)
        if num_new:
            mean = sum([view.placement.num_tokens for view in self.views]) // len(self.views)
            for work, extra in zip(instances.values(), _divided(num_new, len(instances)), strict=True):
                work.num_tokens += extra
                work.num_blocks += extra
                work.num_attends += extra
                work.num_decode_keys += extra * mean
        more = sum([len(move.shares) - len(move.view.placement.on(move.source_id)) for move in moves])
        holders = {i: work for i, work in holders.items() if work.num_attends > 0}
        for work in (*instances.values(), *holders.values()):
            work.num_requests = self._work.num_requests + num_new
            work.num_segments = self._work.instances[self._work.group.leader_id].num_segments + more + num_new
        has_exchange = any(work.num_sent_queries > 0 for work in instances.values())
        return self.cost_model.step_time(
            replace(self._work, instances=instances, holders=holders, has_exchange=has_exchange)
        )


def shared_out(
    views: Iterable[RequestView], source_id: InstanceId, room: Mapping[InstanceId, int]
) -> Iterator[Move]:
    """Yield moves of all KV of each view on an instance, equal parts to all with room, while all has room."""
    left = {i: num_free for i, num_free in room.items() if num_free > 0}
    for view in views:
        num_held = view.placement.tokens_by_instance().get(source_id, 0)
        if num_held > sum(left.values()):
            return
        shares = list(leveled(num_held, left))
        for instance_id, num_tokens in shares:
            left[instance_id] -= num_tokens
        yield Move(view, source_id, shares)


def newcomers_at(
    snapshot: Snapshot, decodes: Sequence[RequestView], num_free: int, planned_ids: Iterable[str]
) -> Newcomers:
    """Return the requests that lack room on an instance with these decodes and `num_free` slots.

    They are its share of those that wait, and as many of the decodes as cannot end in these slots.
    """
    planned = frozenset(planned_ids)
    waiting = [v for v in snapshot.waiting if not v.has_ended and v.request_id not in planned]
    live = (*waiting, *decodes)
    if not live:
        return NOBODY
    num_tokens = max(1, sum([view.num_final_tokens for view in live]) // len(live))
    num_lacking = max(0, sum([view.num_remaining_tokens for view in decodes]) - num_free)
    number = ceil(len(waiting) / len(snapshot.pools)) + min(len(decodes), ceil(num_lacking / num_tokens))
    return Newcomers(number, num_tokens)


def _numbers(most: int) -> list[int]:
    """Return 1, 2, 4 and on, up to `most`, and that."""
    found, number = [], 1
    while number < most:
        found.append(number)
        number *= 2
    return [*found, most] if most else []


def _divided(number: int, parts: int) -> list[int]:
    return [number // parts + (place < number % parts) for place in range(parts)]
