"""The changes of groups in a run, as the server counts them."""

from collections.abc import Iterator, Set
from dataclasses import dataclass

from loong.core.cluster_history import BatchSlice, ClusterHistory
from loong.core.group_changes import GroupChange, group_changes
from loong.core.placement import InstanceId
from loong.core.request import RequestId


@dataclass(frozen=True, slots=True)
class Scaling:
    """A batch, and a change of the group of some of its requests. A batch may have several."""

    batch: BatchSlice
    change: GroupChange


def scalings_of(history: ClusterHistory) -> Iterator[Scaling]:
    """Yield the changes of groups in a run, in the order in which they were planned."""
    last_groups: dict[RequestId, Set[InstanceId]] = {}
    for batch in sorted(history.batches, key=lambda batch: batch.batch_id):
        group = frozenset(batch.group.instance_ids)
        before = [last_groups[i] for i in batch.request_ids if i in last_groups]
        changes = group_changes(group, batch.holder_ids, before)
        yield from (Scaling(batch, change) for change in GroupChange if change in changes)
        last_groups.update(dict.fromkeys(batch.request_ids, group))
