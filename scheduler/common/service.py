"""The KV that a batch reaches where instances serve all batches, few leases and any steps, or nothing."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from loong.core.instance import MAX_SERVED_LISTS, MAX_SERVED_TOKENS, Service
from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot

NOTHING_PLANNED: Mapping[InstanceId, int] = {}


def serves_all(snapshot: Snapshot) -> bool:
    """Return whether all instances serve any number of any batches."""
    return snapshot.services <= {Service.ALL}


def serves_others(snapshot: Snapshot) -> bool:
    """Return whether each instance can serve batches of every group.

    GPUs serve groups of their own host only, so on several hosts they cannot.
    """
    return serves_all(snapshot) or (Service.NONE not in snapshot.services and snapshot.num_hosts == 1)


def can_reach(
    snapshot: Snapshot,
    view: RequestView,
    instance_ids: Collection[InstanceId],
    *,
    in_lease: bool = False,
    planned: Mapping[InstanceId, int] = NOTHING_PLANNED,
) -> bool:
    """Return whether a step, or a lease of decodes, on these instances reaches the KV of a request.

    `planned` are the leases of the present plan that each instance serves.
    """
    if serves_all(snapshot):
        return True
    holder_ids = set(view.placement.instance_ids).difference(instance_ids)
    if not holder_ids:
        return True
    if not serves_others(snapshot):
        return False
    return not in_lease or all(snapshot.takes_lease(i, planned.get(i, 0)) for i in holder_ids)


def leased(
    snapshot: Snapshot,
    decodes: Sequence[RequestView],
    instance_ids: Collection[InstanceId],
    planned: Mapping[InstanceId, int] = NOTHING_PLANNED,
) -> Sequence[RequestView]:
    """Return the decodes that a lease on these instances can have, in their order; `planned` as above."""
    if serves_all(snapshot):
        return decodes
    found = [
        view for view in decodes if can_reach(snapshot, view, instance_ids, in_lease=True, planned=planned)
    ]
    is_served = any(not set(view.placement.instance_ids).issubset(instance_ids) for view in found)
    return list(islice(_listed(snapshot, found), MAX_SERVED_TOKENS)) if is_served else found


def _listed(snapshot: Snapshot, views: Iterable[RequestView]) -> Iterator[RequestView]:
    """Yield requests while the lists of a lease have room for their KV, and for new KV in all slots."""
    listed: Counter[InstanceId] = Counter()
    for view in views:
        listed.update(view.placement.tokens_by_instance())
        if any(n > (MAX_SERVED_LISTS - 1) * snapshot.instance[i].kv_capacity for i, n in listed.items()):
            return
        yield view
