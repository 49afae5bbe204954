"""The accounting of `ClusterState`: instances, requests, batches, and the KV slots that they use."""

from collections.abc import Iterable, Mapping

from loong.core.instructions import Instruction
from loong.core.placement import InstanceId, KVSegment, OwnerId, OwnerView
from loong.core.plan import Eviction, KVMigration
from loong.core.positions import common, subtract
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.core.window_memory import WindowMemory
from loong.state.counts import Counts
from loong.state.flights import Flights
from loong.state.live_requests import LiveRequests
from loong.state.observed_lengths import ObservedLengths
from loong.state.owners import KVOwner
from loong.state.pool_ledger import PoolLedger
from loong.state.window_room import WindowRoom


class Accounting:
    """Instances and slots, live requests, what is in flight, and counts since the start."""

    def __init__(
        self,
        windows: WindowMemory | None = None,
        *,
        keeps_prefixes: bool = False,
        least_saved: int | None = 1,
    ) -> None:
        self.counts, self.pools, self.lengths = Counts(), PoolLedger(), ObservedLengths()
        self.requests = LiveRequests(
            self.pools,
            self.counts,
            keeps_prefixes=keeps_prefixes,
            least_saved=least_saved,
            windows=windows,
        )
        self.flights = Flights(self.pools, self.requests, self.counts, least_saved)
        self.windows: WindowRoom | None = None
        if windows is not None:
            self.windows = WindowRoom(windows, self.pools, self.requests, self.flights, self.counts)

    def snapshot(self, now: float, version: int) -> Snapshot:
        """Return the accounting as values."""
        pools, views, flights = self.pools, self.requests.views, self.flights
        self.requests.refresh()
        unsaved, waiting = self._unsaved(), self.shown()
        hidden = {i: view for i, view in views.waiting.items() if i not in waiting}
        snapshot = Snapshot(
            now=now,
            instances=tuple(pools.instances.values()),
            waiting=tuple(waiting.values()),
            running=tuple(views.running.values()),
            batches=tuple([batch.running for batch in flights.batches.values()]),
            migrations=tuple(flights.migrations.values()),
            copies=tuple(flights.copies.values()),
            stats=self.counts.stats,
            version=version,
            ending=tuple([batch.running for batch in flights.ending.values()]),
            leaving=flights.leaving(),
            returning=pools.returning.copy(),
            returning_memory=pools.returning_memory.copy(),
            lent=pools.lent_tokens() if pools.lent else {},
            following=(*views.following.values(), *hidden.values()),
            output_lengths=self.lengths.counts,
            owners=self._owner_views(unsaved),
            window=0 if self.windows is None else self.windows.window,
            window_free={} if self.windows is None else self.windows.free(),
            unsaved={i: tuple([segment for _, segment in found]) for i, found in unsaved.items()},
        )
        # The values of its cached properties, but copied whole instead of entry by entry.
        vars(snapshot).update(
            instance=pools.instances.copy(),
            request={i: v for i, v in views.views.items() if i not in hidden}
            if hidden
            else views.views.copy(),
            pools=pools.pools.copy(),
            free=pools.free.copy(),
            most_tokens=self.requests.most_tokens,
        )
        return snapshot

    def shown(self) -> Mapping[RequestId, RequestView]:
        """Return the requests that wait and may begin, by id, in order of arrival."""
        waiting = self.requests.views.waiting
        if self.windows is None:
            return waiting
        return {view.request_id: view for view in self.windows.shown(waiting.values())}

    def trim_windows(self, migrations: Iterable[KVMigration]) -> None:
        """Drop KV of layers with a window that is about to move, as far as that serves no request."""
        if self.windows is not None:
            self.windows.trim(migrations)

    def make_room(self) -> tuple[Instruction, ...]:
        """Evict as much as is needed for what is reserved, and let requests begin anew; see `WindowRoom`."""
        self.requests.owners.make_room()
        instructions = () if self.windows is None else self.windows.make_room()
        self.requests.owners.find_new()
        return instructions

    def begin_broken_anew(self, evictions: Iterable[Eviction]) -> list[Instruction]:
        """Let requests begin anew that cannot compute what they lose; see `LiveRequests`.

        One that moves meanwhile does once it has: a plan has no room for all windows that it needs again.
        """
        by_id = self.requests.by_id
        evicted_ids = dict.fromkeys(eviction.segment.owner_id for eviction in evictions)
        lives = [by_id[owner_id] for owner_id in evicted_ids if owner_id in by_id]
        for live in lives:
            live.is_broken |= self.windows is not None and bool(live.migration_ids or live.copied)
        return [instruction for live in lives for instruction in self.requests.begin_broken_anew(live)]

    def empty_cache(self) -> None:
        """Evict all KV that no request reads."""
        self.requests.copies.void_all()
        for instance_id in self.pools.instances:
            self.requests.owners.empty(instance_id)

    def _unsaved(self) -> dict[InstanceId, list[tuple[KVOwner, KVSegment]]]:
        """Return KV that nobody reads, of instances with host tiers that lack it."""
        found: dict[InstanceId, list[tuple[KVOwner, KVSegment]]] = {}
        for tier_id, new in self.requests.owners.new.items():
            tier = self.pools.instances.get(tier_id)
            instance_id = None if tier is None else tier.tier_of
            if instance_id is not None and instance_id in self.pools.free:
                segments = [
                    (owner, KVSegment(owner.owner_id, positions, instance_id))
                    for owner, used in new
                    for unread in common(owner.unread.on(instance_id), used)
                    for positions in subtract((unread,), *owner.coming_to(tier_id))
                ]
                found[instance_id] = segments
        return {instance_id: segments for instance_id, segments in found.items() if segments}

    def _owner_views(
        self, unsaved: Mapping[InstanceId, list[tuple[KVOwner, KVSegment]]]
    ) -> Mapping[OwnerId, OwnerView]:
        views = self.requests.owners.views
        others = {o.owner_id: o for found in unsaved.values() for o, _ in found if o.owner_id not in views}
        return {**views, **{owner_id: o.view() for owner_id, o in others.items()}} if others else views
