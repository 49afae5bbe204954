"""Whether the records of `ClusterState` agree with each other."""

from collections import Counter
from collections.abc import Mapping

from loong.core.errors import InvalidEventError
from loong.core.instance import ElasticInstance
from loong.core.placement import InstanceId
from loong.core.plan import KVMigration
from loong.core.positions import first_overlap
from loong.core.records import InFlightBatch, LiveRequest
from loong.core.request import RequestId
from loong.core.snapshot import ClusterStats


def check_books(
    instances: Mapping[InstanceId, ElasticInstance],
    requests: Mapping[RequestId, LiveRequest],
    batches: Mapping[int, InFlightBatch],
    migrations: Mapping[int, KVMigration],
    stats: ClusterStats,
) -> None:
    """Raise `InvalidEventError` unless the books balance.

    Every position of a live request has one slot, the KV used and reserved of each instance adds up and
    fits, batches, migrations, instances and requests name each other, and every request that arrived is
    live or has ended once.
    """
    _check_requests(requests)
    _check_batches(instances, requests, batches)
    _check_migrations(requests, migrations)
    _check_room(instances, requests, batches, migrations)
    if stats.num_arrived != stats.num_ended + len(requests):
        raise InvalidEventError(f"{stats} does not fit {len(requests)} live requests")


def _check_requests(requests: Mapping[RequestId, LiveRequest]) -> None:
    for request_id, live in requests.items():
        if shared := first_overlap(s.positions for s in live.placement.segments):
            raise InvalidEventError(f"positions {shared} of request {request_id} are in two slots")
        if live.is_at_rest and live.has_ended:
            raise InvalidEventError(f"request {request_id} has ended but keeps its KV")
        if live.is_at_rest and live.view().num_uncomputed_tokens < 1:
            raise InvalidEventError(f"request {request_id} is at rest with nothing to compute")


def _check_batches(
    instances: Mapping[InstanceId, ElasticInstance],
    requests: Mapping[RequestId, LiveRequest],
    batches: Mapping[int, InFlightBatch],
) -> None:
    at_instances = {i: b.batch_id for b in batches.values() for i in b.plan.group.instance_ids}
    for instance_id, instance in instances.items():
        if instance.batch_id != at_instances.pop(instance_id, None):
            raise InvalidEventError(f"{instance} does not fit the batches in flight")
    if at_instances:
        raise InvalidEventError(f"batches run on instances {sorted(at_instances)}, which do not exist")
    at_requests = {r: b.batch_id for b in batches.values() for r in b.plan.request_ids}
    for request_id, live in requests.items():
        if live.batch_id != at_requests.pop(request_id, None):
            raise InvalidEventError(f"request {request_id} says it is in batch {live.batch_id}; it is not")
    if at_requests:
        raise InvalidEventError(f"batches run requests {sorted(at_requests)}, which are not live")


def _check_migrations(
    requests: Mapping[RequestId, LiveRequest], migrations: Mapping[int, KVMigration]
) -> None:
    named = {(migration_id, m.segment.owner_id) for migration_id, m in migrations.items()}
    kept = {(migration_id, r) for r, live in requests.items() for migration_id in live.migration_ids}
    if named != kept:
        raise InvalidEventError(f"migrations {sorted(named)} are in flight, but requests name {sorted(kept)}")


def _check_room(
    instances: Mapping[InstanceId, ElasticInstance],
    requests: Mapping[RequestId, LiveRequest],
    batches: Mapping[int, InFlightBatch],
    migrations: Mapping[int, KVMigration],
) -> None:
    used: Counter[InstanceId] = Counter()
    for live in requests.values():
        used.update(live.placement.tokens_by_instance())
    for segment in (s for batch in batches.values() for s in batch.plan.writes):
        used[segment.instance_id] += len(segment.positions)
    for migration in migrations.values():
        used[migration.destination_id] += len(migration.segment.positions)
    for instance_id, instance in instances.items():
        if instance.kv_used != used.pop(instance_id, 0) or instance.kv_free < 0:
            raise InvalidEventError(f"{instance} does not use what its requests have there")
    if used:
        raise InvalidEventError(f"KV is on instances {sorted(used)}, which do not exist")
