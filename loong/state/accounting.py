"""The accounting of `ClusterState`: instances, requests, batches, and the KV slots that they use."""

from loong.core.snapshot import Snapshot
from loong.state.counts import Counts
from loong.state.flights import Flights
from loong.state.live_requests import LiveRequests
from loong.state.observed_lengths import ObservedLengths
from loong.state.pool_ledger import PoolLedger


class Accounting:
    """Instances and slots, live requests, what is in flight, and counts since the start."""

    def __init__(self, *, keeps_prefixes: bool = False) -> None:
        self.counts, self.pools, self.lengths = Counts(), PoolLedger(), ObservedLengths()
        self.requests = LiveRequests(self.pools, self.counts, keeps_prefixes=keeps_prefixes)
        self.flights = Flights(self.pools, self.requests, self.counts)

    def snapshot(self, now: float, version: int) -> Snapshot:
        """Return the accounting as values."""
        pools, views, flights = self.pools, self.requests.views, self.flights
        self.requests.refresh()
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
            owners=self.requests.owners.views,
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
