"""Checks that the accounting of `ClusterState` balances."""

from collections import Counter

from loong.core.errors import InvalidEventError
from loong.core.instance import InstanceKind
from loong.core.placement import InstanceId
from loong.core.positions import first_overlap
from loong.state.accounting import Accounting
from loong.state.shared_kv import SharedKV


def check_accounting(accounting: Accounting) -> None:
    """Raise `InvalidEventError` unless the accounting balances.

    - Every position of a live request has one slot, which only choices of one request share.
    - The used and reserved KV of each instance adds up and fits.
    - Batches, migrations, instances and requests name each other.
    - Every request that arrived is live or has ended once.
    """
    _check_views(accounting)
    _check_requests(accounting)
    _check_shared(accounting)
    _check_batches(accounting)
    _check_migrations(accounting)
    _check_room(accounting)
    _check_bounds(accounting)
    if accounting.counts.stats.num_arrived != accounting.counts.stats.num_ended + len(
        accounting.requests.by_id
    ):
        raise InvalidEventError(
            f"{accounting.counts.stats} does not fit {len(accounting.requests.by_id)} live requests"
        )


def _check_views(accounting: Accounting) -> None:
    snapshot = accounting.snapshot(now=0.0, version=0)
    lives = accounting.requests.by_id.values()
    fresh = [live.view() for live in lives if live.primary is None and not live.is_leaving]
    waiting = tuple(view for view in fresh if not view.has_begun)
    running = {view.request_id: view for view in fresh if view.has_begun}
    if snapshot.waiting != waiting or {view.request_id: view for view in snapshot.running} != running:
        raise InvalidEventError(f"the views {snapshot.request} are not those of the live requests")


def _check_requests(accounting: Accounting) -> None:
    for request_id, live in accounting.requests.by_id.items():
        if shared := first_overlap(s.positions for s in live.placement.segments):
            raise InvalidEventError(f"positions {shared} of request {request_id} are in two slots")
        if live.is_at_rest and live.has_ended:
            raise InvalidEventError(f"request {request_id} has ended but keeps its KV")
        if live.is_at_rest and live.placement.stop >= live.view().num_known_tokens:
            raise InvalidEventError(f"request {request_id} is not in flight with nothing to compute")


def _check_shared(accounting: Accounting) -> None:
    for request_id, live in accounting.requests.by_id.items():
        for sibling in live.siblings:
            if (
                sibling.primary is not live
                or accounting.requests.by_id.get(sibling.request.request_id) is not sibling
            ):
                raise InvalidEventError(f"{sibling} waits for {request_id}, but not it alone, or is not live")
        if (primary := live.primary) is not None and all(sibling is not live for sibling in primary.siblings):
            raise InvalidEventError(f"request {request_id} waits for {primary}, which does not know")
        for segment in live.view().shared.segments:
            if not live.placement.holds(segment):
                raise InvalidEventError(f"request {request_id} shares {segment}, but does not hold it")
    for shared in _shared_kv(accounting):
        if unknown := shared.holder_ids - accounting.requests.by_id.keys():
            raise InvalidEventError(f"requests {sorted(unknown)} share KV, but are not live")


def _shared_kv(accounting: Accounting) -> tuple[SharedKV, ...]:
    kept = {
        id(live.shared): live.shared for live in accounting.requests.by_id.values() if live.shared is not None
    }
    return tuple(kept.values())


def _check_batches(accounting: Accounting) -> None:
    at_instances = {i: n for n, b in accounting.flights.batches.items() for i in b.plan.group.instance_ids}
    for instance_id, instance in accounting.pools.instances.items():
        if instance.batch_id != at_instances.pop(instance_id, None):
            raise InvalidEventError(f"{instance} does not fit the batches in flight")
    if at_instances:
        raise InvalidEventError(f"batches run on instances {sorted(at_instances)}, which do not exist")
    at_requests = {r: n for n, b in accounting.flights.batches.items() for r in b.request_ids}
    for request_id, live in accounting.requests.by_id.items():
        if live.batch_id != at_requests.pop(request_id, None):
            raise InvalidEventError(f"request {request_id} says it is in batch {live.batch_id}; it is not")
    if at_requests:
        raise InvalidEventError(f"batches run requests {sorted(at_requests)}, which are not live")
    _check_holders(accounting)
    ending = {r: n for n, b in accounting.flights.ending.items() for r in b.request_ids}
    named = {r: live.ending_id for r, live in accounting.requests.by_id.items() if live.ending_id is not None}
    if named != ending:
        raise InvalidEventError(f"requests {ending} are in batches that are ending, but they name {named}")


def _check_holders(accounting: Accounting) -> None:
    """Check that the KV of a running batch is where it was at its beginning."""
    for batch_id, batch in accounting.flights.batches.items():
        placements = [
            accounting.requests.by_id[request_id].placement for request_id in batch.plan.request_ids
        ]
        holder_ids = batch.plan.holder_ids(placements)
        if holder_ids != batch.running.holder_ids:
            raise InvalidEventError(
                f"batch {batch_id} reads KV on instances {holder_ids}, "
                f"but began with holders {batch.running.holder_ids}"
            )


def _check_migrations(accounting: Accounting) -> None:
    named = {(migration_id, m.segment.owner_id) for migration_id, m in accounting.flights.migrations.items()}
    kept = {
        (migration_id, r)
        for r, live in accounting.requests.by_id.items()
        for migration_id in live.migration_ids
    }
    if named != kept:
        raise InvalidEventError(f"migrations {sorted(named)} are in flight, but requests name {sorted(kept)}")


def _check_room(accounting: Accounting) -> None:
    used: Counter[InstanceId] = Counter()
    for live in accounting.requests.by_id.values():
        used.update(live.placement.tokens_by_instance())
    for batch in accounting.flights.batches.values():
        used.update(batch.plan.num_reserved_tokens)
    copied = [migration for live in accounting.requests.by_id.values() for migration in live.copied]
    for migration in (*accounting.flights.migrations.values(), *copied):
        used[migration.destination_id] += len(migration.segment.positions)
    for shared in _shared_kv(accounting):
        used.subtract(shared.num_saved)
    for instance_id, instance in accounting.pools.instances.items():
        if instance.kv_used != used.pop(instance_id, 0) or instance.kv_used > instance.kv_capacity:
            raise InvalidEventError(f"{instance} does not use what its requests have there")
    if used:
        raise InvalidEventError(f"KV is on instances {sorted(used)}, which do not exist")


def _check_bounds(accounting: Accounting) -> None:
    instances = accounting.pools.instances.values()
    full = [i for i in instances if i.kind is InstanceKind.FULL and not i.is_draining]
    if accounting.pools.free != {i.instance_id: i.kv_free for i in full}:
        raise InvalidEventError(f"the slots {accounting.pools.free} are not those that are free of {full}")
    if accounting.pools.pools != {i.instance_id: i.kv_capacity for i in full}:
        raise InvalidEventError(f"the pools {accounting.pools.pools} are not those of {full}")
    most_tokens = accounting.requests.most_tokens
    for request_id, live in accounting.requests.by_id.items():
        if live.view().num_final_tokens > most_tokens:
            raise InvalidEventError(
                f"no request comes to more than {most_tokens} tokens, but {request_id} does"
            )
