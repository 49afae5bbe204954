"""Checks that the accounting of `ClusterState` balances."""

from collections import Counter
from collections.abc import Collection, Iterable
from itertools import chain

from loong.core.errors import InvalidEventError
from loong.core.instance import InstanceKind
from loong.core.placement import InstanceId
from loong.core.positions import common, first_overlap, subtract
from loong.state.accounting import Accounting
from loong.state.flights import Flights
from loong.state.live_request import LiveRequest
from loong.state.live_requests import LiveRequests
from loong.state.owners import KVOwner
from loong.state.pool_ledger import PoolLedger


def check_accounting(accounting: Accounting) -> None:
    """Raise `InvalidEventError` unless the accounting balances.

    - Every position of a live request has one slot, and every slot one owner.
    - The used and reserved KV of each instance adds up and fits.
    - Batches, migrations, instances, requests and owners name each other.
    - Every request that arrived is live or has ended once.
    """
    pools, requests, flights = accounting.pools, accounting.requests, accounting.flights
    lives, stats = requests.by_id.values(), accounting.counts.stats
    _check_choices(requests)
    _check_views(accounting, lives)
    _check_requests(lives, requests.most_tokens)
    _check_owners(requests)
    _check_batches(pools, requests, flights)
    _check_migrations(requests, flights)
    _check_room(accounting)
    _check_bounds(pools)
    if accounting.windows is not None:
        accounting.windows.check()
    if stats.num_arrived != stats.num_ended + len(lives):
        raise InvalidEventError(f"{stats} does not fit {len(lives)} live requests")


def _check_views(accounting: Accounting, lives: Collection[LiveRequest]) -> None:
    snapshot = accounting.snapshot(now=0.0, version=0)
    hidden = [live.is_sibling or live.is_leaving or live.is_following or live.is_broken for live in lives]
    fresh = [live.view() for live, is_hidden in zip(lives, hidden, strict=True) if not is_hidden]
    shown = accounting.shown()
    waiting = tuple(view for view in fresh if not view.has_begun and view.request_id in shown)
    running = {view.request_id: view for view in fresh if view.has_begun}
    if snapshot.waiting != waiting or {view.request_id: view for view in snapshot.running} != running:
        raise InvalidEventError(f"the views {snapshot.request} are not those of the live requests")


def _check_requests(lives: Iterable[LiveRequest], most_tokens: int) -> None:
    for live in lives:
        view = live.view()
        if twice := first_overlap(s.positions for s in live.placement.segments):
            raise InvalidEventError(f"positions {twice} of request {view.request_id} are in two slots")
        if live.is_at_rest and live.has_ended:
            raise InvalidEventError(f"request {view.request_id} has ended but keeps its KV")
        if live.is_at_rest and live.placement.stop >= view.num_known_tokens:
            raise InvalidEventError(f"request {view.request_id} is not in flight with nothing to compute")
        if view.num_final_tokens > most_tokens:
            raise InvalidEventError(
                f"no request comes to more than {most_tokens} tokens, but {view.request_id} does"
            )


def _check_choices(requests: LiveRequests) -> None:
    for request_id, live in requests.by_id.items():
        for choice in live.unstarted:
            other_id = choice.request.request_id
            if choice.unstarted is not live.unstarted or requests.by_id.get(other_id) is not choice:
                raise InvalidEventError(f"choice {other_id} is to start with {request_id}, but does not know")
        if live.unstarted and not any(choice is live for choice in live.unstarted):
            raise InvalidEventError(f"choice {request_id} waits for others, which do not know")


def _check_owners(requests: LiveRequests) -> None:
    """Check that users read what an owner has, where their placements say, and that some user reads it."""
    named = {(owner.owner_id, r) for r, live in requests.by_id.items() for owner in live.borrowed}
    owners = requests.owners.by_id.values()
    kept = {(owner.owner_id, user_id) for owner in owners for user_id in owner.users}
    if named != kept:
        raise InvalidEventError(
            f"requests borrow from owners {sorted(named)}, whose users are {sorted(kept)}"
        )
    for owner in owners:
        if owner.is_empty != (owner.owner_id in requests.owners.remembered):
            raise InvalidEventError(f"owner {owner.owner_id} has nothing, or is only remembered but has")
        for user_id, read in owner.users.items():
            for segment in read:
                if not owner.placement.holds(segment):
                    raise InvalidEventError(f"request {user_id} reads {segment}: not there")
                if not requests.by_id[user_id].placement.holds(segment._replace(owner_id=user_id)):
                    raise InvalidEventError(f"request {user_id} borrows {segment}, but does not read it")
        for instance_id in owner.placement.instance_ids:
            _check_unread(owner, instance_id)
        if gone := [s for s in owner.retired.segments if not owner.elsewhere(s)]:
            raise InvalidEventError(f"owner {owner.owner_id} is to drop {gone}, of which it has no copy")


def _check_unread(owner: KVOwner, instance_id: InstanceId) -> None:
    """Check that an owner knows what nobody reads of its KV on an instance, which is there once."""
    held = owner.placement.on(instance_id)
    if twice := first_overlap(held):
        raise InvalidEventError(f"positions {twice} of {owner.owner_id} are twice on instance {instance_id}")
    reading = chain(*owner.users.values(), owner.pinned.values())
    unread = subtract(held, *[s.positions for s in reading if s.instance_id == instance_id])
    known = owner.num_unread_tokens()[instance_id]
    retired = common(owner.retired.on(instance_id), *unread)
    if sum(map(len, unread)) != known or (known and not owner.is_kept) or retired:
        raise InvalidEventError(f"owner {owner.owner_id} keeps {unread}, which nobody reads")


def _check_batches(pools: PoolLedger, requests: LiveRequests, flights: Flights) -> None:
    at_instances = {i: n for n, b in flights.batches.items() for i in b.plan.group.instance_ids}
    for instance_id, instance in pools.instances.items():
        if instance.batch_id != at_instances.pop(instance_id, None):
            raise InvalidEventError(f"{instance} does not fit the batches in flight")
    if at_instances:
        raise InvalidEventError(f"batches run on instances {sorted(at_instances)}, which do not exist")
    at_requests = {r: n for n, b in flights.batches.items() for r in b.request_ids}
    for request_id, live in requests.by_id.items():
        if live.batch_id != at_requests.pop(request_id, None):
            raise InvalidEventError(f"request {request_id} says it is in batch {live.batch_id}; it is not")
    if at_requests:
        raise InvalidEventError(f"batches run requests {sorted(at_requests)}, which are not live")
    _check_holders(requests, flights)
    ending = {r: n for n, b in flights.ending.items() for r in b.request_ids}
    named = {r: live.ending_id for r, live in requests.by_id.items() if live.ending_id is not None}
    if named != ending:
        raise InvalidEventError(f"requests {ending} are in batches that are ending, but they name {named}")


def _check_holders(requests: LiveRequests, flights: Flights) -> None:
    """Check that the KV of a running batch is where it was at its beginning."""
    for batch_id, batch in flights.batches.items():
        holder_ids = batch.plan.holder_ids([live.placement for live in requests.of(batch.plan)])
        if holder_ids != batch.running.holder_ids:
            raise InvalidEventError(
                f"batch {batch_id} reads KV on instances {holder_ids}, "
                f"but began with holders {batch.running.holder_ids}"
            )


def _check_migrations(requests: LiveRequests, flights: Flights) -> None:
    named = {(migration_id, m.segment.owner_id) for migration_id, m in flights.migrations.items()}
    kept = {(n, request_id) for request_id, live in requests.by_id.items() for n in live.migration_ids}
    if named != kept:
        raise InvalidEventError(f"migrations {sorted(named)} are in flight, but requests name {sorted(kept)}")
    named = {(migration_id, m.segment.owner_id) for migration_id, m in flights.copies.items()}
    kept = {(n, owner.owner_id) for owner in requests.owners.by_id.values() for n in owner.arriving}
    if named != kept:
        raise InvalidEventError(f"copies {sorted(named)} are in flight, but owners name {sorted(kept)}")
    for owner in requests.owners.by_id.values():
        if gone := [s for s in owner.pinned.values() if not owner.placement.holds(s)]:
            raise InvalidEventError(f"migrations read {gone} of owner {owner.owner_id}, which are not there")


def _check_room(accounting: Accounting) -> None:
    """Check that each slot in use has one owner, or is reserved by one batch or migration."""
    lives, flights = accounting.requests.by_id.values(), accounting.flights
    used: Counter[InstanceId] = Counter()
    cached: Counter[InstanceId] = Counter()
    for live in lives:
        used.update(live.own.tokens_by_instance())
    for owner in accounting.requests.owners.by_id.values():
        used.update(owner.placement.tokens_by_instance())
        used.subtract(owner.num_unread_tokens())
        cached.update(owner.num_unread_tokens())
    for batch in flights.batches.values():
        used.update(batch.plan.num_reserved_tokens)
    in_flight = (*flights.migrations.values(), *flights.copies.values())
    for migration in (*in_flight, *(copy for live in lives for copy in live.copied)):
        used[migration.destination_id] += len(migration.segment.positions)
    for instance_id, instance in accounting.pools.instances.items():
        counted = instance.kv_used, instance.kv_cached
        if counted != (used.pop(instance_id, 0), cached.pop(instance_id, 0)):
            raise InvalidEventError(f"{instance} does not use what its requests and owners have there")
        if sum(counted) > instance.kv_capacity:
            raise InvalidEventError(f"{instance} has more than it has room for")
    if +used or +cached:
        raise InvalidEventError(f"KV is on instances {sorted(used | cached)}, which do not exist")


def _check_bounds(pools: PoolLedger) -> None:
    full = [i for i in pools.instances.values() if i.kind is InstanceKind.FULL and not i.is_draining]
    if pools.free != {i.instance_id: i.kv_free for i in full}:
        raise InvalidEventError(f"the slots {pools.free} are not those that are free of {full}")
    if pools.pools != {i.instance_id: i.kv_capacity for i in full}:
        raise InvalidEventError(f"the pools {pools.pools} are not those of {full}")
