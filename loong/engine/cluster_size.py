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
    """An instance, its state and kind, and the tokens of KV that it holds and can hold."""

    instance_id: InstanceId
    state: InstanceState
    kv_used: int
    kv_capacity: int
    kind: InstanceKind = InstanceKind.FULL


@dataclass(frozen=True, slots=True)
class MemoryNumbers:
    """The memory instances that are asked for, the most that there can be, and the tokens of KV on each."""

    num_instances: int = 0
    max_instances: int = 0
    kv_capacity: int = 0


NO_MEMORY = MemoryNumbers()


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """The instances that there are, the number that is asked for, and the most that there can be.

    `is_changing` while an operator's number is not reached. Memory instances, of `memory`, are not in the
    numbers. Their ids come after those of all other instances that there can be. Room that other engines lend
    has the last ids, and is in none of the numbers.
    """

    num_instances: int
    max_instances: int
    instances: tuple[InstanceStatus, ...]
    is_changing: bool = False
    memory: MemoryNumbers = NO_MEMORY

    @property
    def is_done(self) -> bool:
        """Return whether exactly the instances that are asked for serve."""
        num_own = self.max_instances + self.memory.max_instances
        own = [i for i in self.instances if i.instance_id < num_own]
        serving = [i.instance_id for i in own if i.state is InstanceState.SERVING]
        wanted = sorted(wanted_ids(self.num_instances, self.max_instances, self.memory.num_instances))
        return serving == wanted and len(serving) == len(own) and not self.is_changing


def wanted_ids(num_instances: int, max_instances: int, num_memory: int) -> set[InstanceId]:
    """Return the ids of the first instances, and of the first memory instances behind all others."""
    return {*range(num_instances), *range(max_instances, max_instances + num_memory)}


def size_of(
    snapshot: Snapshot,
    wanted_ids: Set[InstanceId],
    kv_capacity: int,
    num_instances: int,
    max_instances: int,
    quarantined_ids: Set[InstanceId] = frozenset(),
    memory: MemoryNumbers = NO_MEMORY,
) -> ClusterSize:
    """Return the instances in the order of their ids.

    Those of `wanted_ids` that are not in the snapshot are started, and will have `kv_capacity`, or that of
    `memory`.
    """

    def absent(instance_id: InstanceId, state: InstanceState) -> InstanceStatus:
        if instance_id < max_instances:
            return InstanceStatus(instance_id, state, 0, kv_capacity)
        return InstanceStatus(instance_id, state, 0, memory.kv_capacity, InstanceKind.ATTENTION)

    found = {
        i.instance_id: InstanceStatus(
            i.instance_id,
            InstanceState.DRAINING if i.is_draining else InstanceState.SERVING,
            i.kv_used,
            i.kv_capacity,
            i.kind,
        )
        for i in snapshot.instances
        if i.kind is not InstanceKind.HOST
    }
    for instance_id in wanted_ids - found.keys():
        is_lost = instance_id in snapshot.returning.keys() | snapshot.returning_memory.keys()
        found[instance_id] = absent(instance_id, InstanceState.LOST if is_lost else InstanceState.STARTING)
    for instance_id in quarantined_ids:
        found[instance_id] = absent(instance_id, InstanceState.QUARANTINED)
    instances = tuple(found[i] for i in sorted(found))
    return ClusterSize(num_instances, max_instances, instances, memory=memory)
