"""The room of layers with a window: KV that no query sees any more makes way for new KV."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter

from loong.core.errors import InvalidEventError, InvalidPlanError
from loong.core.instance import InstanceKind
from loong.core.instructions import Instruction, ReleaseWindows
from loong.core.placement import InstanceId, KVSegment, OwnerId, tokens_by_instance
from loong.core.plan import KVMigration, PreemptionReason
from loong.core.positions import at_or_after, coalesce, common, num_below, subtract
from loong.core.request import RequestId, RequestView
from loong.core.window_memory import WindowMemory
from loong.state.counts import Counts
from loong.state.flights import Flights
from loong.state.live_request import LiveRequest
from loong.state.live_requests import LiveRequests
from loong.state.owners import KVOwner
from loong.state.pool_ledger import PoolLedger

_SPARE = 8  # a part of the memory that is made free at a time


class WindowRoom:
    """Keeps KV of layers with a window within their memory.

    All KV stays until its room is needed. First goes what is behind the windows of live requests, then that
    of owners. Last windows of their uses, where a request can go on, stay longer: the least recent go next.
    Last of all, requests begin anew that came last.
    """

    def __init__(
        self,
        memory: WindowMemory,
        pools: PoolLedger,
        requests: LiveRequests,
        flights: Flights,
        counts: Counts,
    ) -> None:
        self._memory, self._pools, self._requests = memory, pools, requests
        self._flights, self._counts = flights, counts
        self._most: Counter[InstanceId] = Counter()  # less what was reserved before the first: tokens

    @property
    def window(self) -> int:
        """Return the largest window of a layer."""
        return self._memory.window

    def shown(self, waiting: Iterable[RequestView]) -> tuple[RequestView, ...]:
        """Return the requests that may begin, in their order: as many as have room for their windows."""
        views, memory = tuple(waiting), self._memory
        begun = [live.request for live in self._requests.by_id.values() if live.has_begun]
        held = sum(memory.num_held(len(r.prompt_token_ids) + r.sampling_params.max_tokens) for r in begun)
        first = set[RequestId]()
        for view in sorted(views, key=lambda view: -view.priority):
            held += memory.num_held(view.num_prompt_tokens + view.max_tokens)
            if held > memory.room_of_requests:
                break
            first.add(view.request_id)
        return tuple([view for view in views if view.request_id in first])

    def make_room(self) -> tuple[Instruction, ...]:
        """Make room for all that is reserved. Return instructions besides those of owners.

        Raises `InvalidPlanError` if that cannot be.
        """
        taken, capacity = self._pools.taken, self._memory.capacity
        if all(self._most[i] + taken[i] <= capacity for i in self._limited()):
            return ()
        instructions: list[Instruction] = []
        for live in self._requests.by_id.values():
            self._drop_passed(live)
        used = self._used()
        self._drop_cached(used)
        while over := {i for i, number in used.items() if number > capacity}:
            if (last := self._last_at_rest(over)) is None:
                raise InvalidPlanError(
                    f"instances {sorted(over)} have too little memory for layers with a window: "
                    f"{capacity} tokens"
                )
            self._counts.add_preemptions((PreemptionReason.NO_ROOM,))
            instructions += self._requests.preempt(last.request.request_id)
            used = self._used()
            self._drop_cached(used)
        self._most = Counter({i: used[i] - taken[i] for i in self._limited()})
        return tuple(instructions)

    def check(self) -> None:
        """Raise `InvalidEventError` if a request lacks KV that its next queries see, or there is too much."""
        for request_id, live in self._requests.by_id.items():
            if not (live.is_broken or live.has_ended) and live.lacks_windows(self._needed_from(live)):
                raise InvalidEventError(f"request {request_id} lacks KV in layers with a window")
        if over := {i: n for i, n in self._used().items() if n > self._memory.capacity}:
            raise InvalidEventError(f"layers with a window have KV of {over} tokens by instance")

    def free(self) -> Mapping[InstanceId, int]:
        """Return the tokens for which each instance has room besides those that requests need."""
        needed: Counter[InstanceId] = Counter()
        owners = dict[OwnerId, KVOwner]()
        for live in self._requests.by_id.values():
            if live.placement.segments:
                first = max(live.windows_from, self._needed_from(live))
                _count(needed, (*live.own.segments, *[copy.arriving for copy in live.copied]), first)
                owners.update((owner.owner_id, owner) for owner in live.borrowed)
        for copy in self._flights.copies.values():  # all that it brings stays, in all copies
            owner = self._requests.owners.by_id[copy.segment.owner_id]
            owners[owner.owner_id] = owner
            _count(needed, (copy.arriving,), 0)
        self._count_in_flight(needed, lambda live: max(live.windows_from, self._needed_from(live)))
        for owner in owners.values():
            others = subtract((range(owner.start, owner.stop),), *self._needed_of(owner))
            for segment in owner.placement.segments:
                needed[segment.instance_id] += sum(map(len, subtract(_whole(owner, segment), *others)))
        return {i: self._memory.capacity - needed[i] for i in self._limited()}

    def trim(self, migrations: Iterable[KVMigration]) -> None:
        """Drop KV that is about to move, as far as that serves no request.

        Last windows of owners go, too, where what moves has no room to keep them, at either end.
        """
        cached = list[tuple[KVOwner, KVMigration]]()
        for migration in migrations:
            owner_id = migration.segment.owner_id
            if (owner := self._requests.owners.by_id.get(owner_id)) is not None:
                self._drop(owner, *self._last_windows(owner))
                cached.append((owner, migration))
            else:
                self._drop_passed(self._requests.by_id[owner_id])
        free = dict(self.free()) if cached else {}
        for owner, migration in cached:
            needed = self._needed_to_move(owner, migration)
            if any(number > free.get(i, number) for i, number in needed.items()):
                self._drop(owner)
            else:
                free = {i: number - needed[i] for i, number in free.items()}

    def _needed_to_move(self, owner: KVOwner, migration: KVMigration) -> Counter[InstanceId]:
        """Return the tokens of each instance that stay for a migration: all copies of its KV, and the new."""
        copies = (*owner.placement.segments, migration.arriving)
        needed = Counter[InstanceId]()
        for copy in copies:
            needed[copy.instance_id] += sum(
                map(len, common(_whole(owner, copy), migration.segment.positions))
            )
        return needed

    def _limited(self) -> list[InstanceId]:
        return [i for i, one in self._pools.instances.items() if one.kind is not InstanceKind.HOST]

    def _used(self) -> Counter[InstanceId]:
        """Return the tokens of each instance that layers with a window have, or will have."""
        used: Counter[InstanceId] = Counter()
        for live in self._requests.by_id.values():
            moved = [copy.arriving for copy in live.copied]
            _count(used, (*live.own.segments, *moved), live.windows_from)
        self._count_in_flight(used, attrgetter("windows_from"))
        for owner in self._requests.owners.by_id.values():
            for segment in (*owner.placement.segments, *owner.arriving.values()):
                used[segment.instance_id] += sum(map(len, _whole(owner, segment)))
        return Counter({i: used[i] for i in self._limited()})

    def _count_in_flight(self, used: Counter[InstanceId], first_of: Callable[[LiveRequest], int]) -> None:
        """Count what batches and migrations of requests are to store, of batches from a position on."""
        for batch in self._flights.batches.values():
            plan = batch.plan
            for request_id in plan.request_ids:
                _count(used, plan.writes_of(request_id), first_of(self._requests.by_id[request_id]))
            _count(used, [push.passing for push in plan.pushes if push.is_attended_in_place], 0)
        for number, migration in self._flights.migrations.items():
            _count(used, (migration.arriving,), self._flights.windows_from[number])

    def _needed_from(self, live: LiveRequest) -> int:
        """Return the first position that a query of a request may see in layers with a window.

        One that is to begin anew needs no more than what is in flight reads.
        """
        request_id, firsts = live.request.request_id, list[int]()
        for batch_id in (live.ending_id, live.batch_id):
            if batch_id is None:
                continue
            batch = self._flights.batch(batch_id, "is to be looked at")
            num_passed = batch.num_tokens.get(request_id, 0) if batch.is_lease else 0
            firsts += [block.positions[0] + num_passed for block in batch.plan.blocks_of(request_id)]
        held = live.placement
        first = min(firsts, default=held.stop if live.is_broken else held.first_missing)
        return max(0, first - self._memory.window + 1)

    def _drop_passed(self, live: LiveRequest) -> None:
        """Drop the own KV of a request that its next queries do not see."""
        first = self._needed_from(live)
        if first <= live.windows_from:
            return
        batch = self._flights.batches.get(live.batch_id or 0)
        made = () if batch is None else batch.plan.writes_of(live.request.request_id)
        passed = range(live.windows_from, first)
        live.windows_from = first
        copied = [copy.arriving for copy in live.copied]
        for segment in (*live.own.segments, *made, *copied):
            for positions in common((segment.positions,), passed):
                self._release(segment._replace(positions=positions))

    def _drop_cached(self, used: Counter[InstanceId]) -> None:
        """Drop KV of owners that no request needs from instances with much of it, and from `used`."""
        most = self._memory.capacity - self._memory.capacity // _SPARE
        for owner in self._owners_on(used, most):
            used -= self._drop(owner, *self._last_windows(owner))
        for instance_id in [i for i, number in used.items() if number > most]:
            for owner, stop in self._requests.owners.uses_on(instance_id):
                if used[instance_id] <= most:
                    break
                others = [p for p in self._last_windows(owner) if p.stop != stop]
                used -= self._drop(owner, *others)
        for owner in self._owners_on(used, most):
            used -= self._drop(owner)

    def _owners_on(self, used: Mapping[InstanceId, int], most: int) -> Iterator[KVOwner]:
        """Yield owners with KV on instances that have more than `most` tokens."""
        for owner in tuple(self._requests.owners.by_id.values()):
            if any(used.get(i, 0) > most for i in owner.placement.instance_ids):
                yield owner

    def _needed_of(self, owner: KVOwner) -> list[range]:
        """Return the positions of an owner that its users need, or that arrive, perhaps some twice.

        Host tiers keep KV of all layers, so what arrives there needs nothing.
        """
        needed = [s.positions for s in owner.arriving.values() if self._pools.serves(s.instance_id)]
        for user_id, segments in owner.users.items():
            first = self._needed_from(self._requests.by_id[user_id])
            needed += filter(None, at_or_after([segment.positions for segment in segments], first))
        return needed

    def _last_windows(self, owner: KVOwner) -> list[range]:
        """Return the last window of each use of an owner that is whole, and one more.

        The last known token of a request is computed in any case: it may end a use.
        """
        uses = [range(max(owner.start, stop - self._memory.window), stop) for stop in owner.uses]
        return [positions for positions in uses if not common((positions,), *owner.windowless)]

    def _drop(self, owner: KVOwner, *kept: range) -> Counter[InstanceId]:
        """Drop the KV of an owner but what is kept, and what its users need; return how much."""
        whole = range(owner.start, owner.stop)
        going = subtract((whole,), *kept, *self._needed_of(owner), *owner.windowless)
        gone = list[KVSegment]()
        for segment in owner.placement.segments:
            gone += [segment._replace(positions=met) for met in common(going, segment.positions)]
        for segment in gone:
            self._release(segment)
            new = subtract((segment.positions,), *owner.windowless)  # once, if there are copies
            owner.windowless = coalesce((*owner.windowless, *new))
        if gone:
            owner.has_changed = True
            self._requests.owners.see(owner)
        return Counter(tokens_by_instance(gone))

    def _release(self, segment: KVSegment) -> None:
        """Drop KV on its instance."""
        owner_id, positions, instance_id = segment
        self._requests.owners.instruct(ReleaseWindows(owner_id, (instance_id,), positions))

    def _last_at_rest(self, over: set[InstanceId]) -> LiveRequest | None:
        """Return the request to begin anew that came last, of those with KV on these instances."""
        found = [
            live
            for live in self._requests.by_id.values()
            if live.is_at_rest and not (live.copied or live.has_ended)
            if not over.isdisjoint(live.placement.instance_ids)
        ]
        return max(found, key=lambda live: (-live.request.priority, live.number), default=None)


def _count(used: Counter[InstanceId], segments: Iterable[KVSegment], first: int) -> None:
    for _, positions, instance_id in segments:
        used[instance_id] += len(positions) - num_below((positions,), first)


def _whole(owner: KVOwner, segment: KVSegment) -> tuple[range, ...]:
    """Return the positions of some KV of an owner that layers with a window have, too."""
    return subtract((segment.positions,), *owner.windowless)
