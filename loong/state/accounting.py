"""The accounting of `ClusterState`: instances, requests, batches, and the KV slots that they use."""

from collections.abc import Mapping

from loong.core.placement import InstanceId, KVSegment, OwnerId, OwnerView
from loong.core.positions import common, subtract
from loong.core.snapshot import Snapshot
from loong.state.counts import Counts
from loong.state.flights import Flights
from loong.state.live_requests import LiveRequests
from loong.state.observed_lengths import ObservedLengths
from loong.state.owners import KVOwner
from loong.state.pool_ledger import PoolLedger


class Accounting:
    """Instances and slots, live requests, what is in flight, and counts since the start."""

    def __init__(self, *, keeps_prefixes: bool = False, least_saved: int | None = 1) -> None:
        self.counts, self.pools, self.lengths = Counts(), PoolLedger(), ObservedLengths()
        self.requests = LiveRequests(
            self.pools, self.counts, keeps_prefixes=keeps_prefixes, least_saved=least_saved
        )
        self.flights = Flights(self.pools, self.requests, self.counts, least_saved)

    def snapshot(self, now: float, version: int) -> Snapshot:
        """Return the accounting as values."""
        pools, views, flights = self.pools, self.requests.views, self.flights
        self.requests.refresh()
        unsaved = self._unsaved()
        snapshot = Snapshot(
            now=now,
            instances=tuple(pools.instances.values()),
            waiting=tuple(views.waiting.values()),
            running=tuple(views.running.values()),
            batches=tuple([batch.running for batch in flights.batches.values()]),
            migrations=tuple(flights.migrations.values()),
            copies=tuple(flights.copies.values()),
            stats=self.counts.stats,
            version=version,
            ending=tuple([batch.running for batch in flights.ending.values()]),
            leaving=flights.leaving(),
            returning=pools.returning.copy(),
            following=tuple(views.following.values()),
            output_lengths=self.lengths.counts,
            owners=self._owner_views(unsaved),
            unsaved={i: tuple([segment for _, segment in found]) for i, found in unsaved.items()},
        )
        # The values of its cached properties, but copied whole instead of entry by entry.
        vars(snapshot).update(
            instance=pools.instances.copy(),
            request=views.views.copy(),
            pools=pools.pools.copy(),
            free=pools.free.copy(),
            most_tokens=self.requests.most_tokens,
        )
        return snapshot

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
