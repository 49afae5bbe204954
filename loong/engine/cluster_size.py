"""The instances of a cluster as operators see them."""

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum

from loong.core.instance import InstanceKind
from loong.core.placement import InstanceId
from loong.core.snapshot import Snapshot


class InstanceState(Enum):
    """The state of an instance, for operators."""

    SERVING = "serving"
    DRAINING = "draining"  # takes nothing new, and leaves when it is empty
    STARTING = "starting"  # joins when it is ready
    LOST = "lost"  # is started again
    QUARANTINED = "quarantined"  # failed too often to be started again


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """An instance, its state, and the tokens of KV that it holds and can hold."""

    instance_id: InstanceId
    state: InstanceState
    kv_used: int
    kv_capacity: int


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """The instances that there are, the number that is asked for, and the most that there can be.

    `is_changing` while an operator's number is not reached.
    """

    num_instances: int
    max_instances: int
    instances: tuple[InstanceStatus, ...]
    is_changing: bool = False

    @property
    def is_done(self) -> bool:
        """Return whether exactly the instances that are asked for serve."""
        serving = [i.instance_id for i in self.instances if i.state is InstanceState.SERVING]
        are_all = serving == list(range(self.num_instances)) and len(serving) == len(self.instances)
        return are_all and not self.is_changing


def size_of(
    snapshot: Snapshot,
    wanted_ids: Set[InstanceId],
    kv_capacity: int,
    num_instances: int,
    max_instances: int,
    quarantined_ids: Set[InstanceId] = frozenset(),
) -> ClusterSize:
    """Return the instances in the order of their ids.

    Those of `wanted_ids` that are not in the snapshot are started, and will have `kv_capacity`.
    """
    found = {
        i.instance_id: InstanceStatus(
            i.instance_id,
            InstanceState.DRAINING if i.is_draining else InstanceState.SERVING,
            i.kv_used,
            i.kv_capacity,
        )
        for i in snapshot.instances
        if i.kind is not InstanceKind.HOST
    }
    for instance_id in wanted_ids - found.keys():
        state = InstanceState.LOST if instance_id in snapshot.returning else InstanceState.STARTING
        found[instance_id] = InstanceStatus(instance_id, state, 0, kv_capacity)
    for instance_id in quarantined_ids:
        found[instance_id] = InstanceStatus(instance_id, InstanceState.QUARANTINED, 0, kv_capacity)
    return ClusterSize(num_instances, max_instances, tuple(found[i] for i in sorted(found)))
