"""The KV that a batch reaches where instances serve decode leases only, or everything."""

from collections.abc import Collection, Sequence

from loong.core.instance import MAX_SERVED_TOKENS, InstanceKind, Service
from loong.core.placement import InstanceId
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot


def serves_all(snapshot: Snapshot) -> bool:
    """Return whether all instances serve any batch."""
    full = (i for i in snapshot.instances if i.kind is InstanceKind.FULL)
    return all(instance.serves is Service.ALL for instance in full)


def can_reach(
    snapshot: Snapshot, view: RequestView, instance_ids: Collection[InstanceId], *, in_lease: bool = False
) -> bool:
    """Return whether a step, or a lease of decodes, on these instances reaches the KV of a request."""
    holder_ids = set(view.placement.instance_ids).difference(instance_ids)
    if not holder_ids or serves_all(snapshot):
        return True
    return in_lease and not any(holder_ids.intersection(batch.holder_ids) for batch in snapshot.batches)


def leased(
    snapshot: Snapshot, decodes: Sequence[RequestView], instance_ids: Collection[InstanceId]
) -> Sequence[RequestView]:
    """Return the decodes that a lease on these instances can have, in their order."""
    if serves_all(snapshot):
        return decodes
    found = [view for view in decodes if can_reach(snapshot, view, instance_ids, in_lease=True)]
    is_served = any(not set(view.placement.instance_ids).issubset(instance_ids) for view in found)
    return found[:MAX_SERVED_TOKENS] if is_served else found
