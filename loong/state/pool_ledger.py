"""The instances of a cluster, and the slots of their pools that are in use."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from loong.core.errors import InvalidEventError
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import InstanceId


@dataclass(slots=True)
class PoolLedger:
    """Instances, of which `kv_used` counts KV and the slots that batches and migrations have reserved.

    `pools` and `free` are those of a snapshot, so that no plan looks at every instance for them; `returning`
    are the slots of lost instances that are being started again.
    """

    instances: dict[InstanceId, ElasticInstance] = field(default_factory=dict)
    pools: dict[InstanceId, int] = field(default_factory=dict)
    free: dict[InstanceId, int] = field(default_factory=dict)
    returning: dict[InstanceId, int] = field(default_factory=dict)

    def join(self, instance: ElasticInstance) -> None:
        """Add a new instance. Raises `InvalidEventError` if it is there, or is not empty."""
        if instance.instance_id in self.instances:
            raise InvalidEventError(f"instance {instance.instance_id} joined twice")
        if instance.kv_used or instance.batch_id is not None:
            raise InvalidEventError(
                f"instance {instance.instance_id} joined with {instance.kv_used} tokens and batch "
                f"{instance.batch_id}; it must come empty"
            )
        self.returning.pop(instance.instance_id, None)
        self.instances[instance.instance_id] = instance
        if instance.kind is InstanceKind.FULL:
            self.pools[instance.instance_id] = instance.kv_capacity
            self.free[instance.instance_id] = instance.kv_free

    def drain(self, instance_id: InstanceId) -> None:
        """Let an instance take nothing new. Raises `InvalidEventError` if it is not there, or drains."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.is_draining:
            what = "was not there" if instance is None else "does so already"
            raise InvalidEventError(f"instance {instance_id} is to drain, but {what}")
        self.instances[instance_id] = replace(instance, is_draining=True)
        self.pools.pop(instance_id, None)
        self.free.pop(instance_id, None)

    def lose(self, instance_id: InstanceId, *, returns: bool) -> None:
        """Remove an instance; if it `returns`, its slots are expected again."""
        if returns and self.instances[instance_id].kind is InstanceKind.FULL:
            self.returning[instance_id] = self.instances[instance_id].kv_capacity
        self._remove(instance_id)

    def leave(self, instance_id: InstanceId) -> None:
        """Remove an instance that has nothing, or that was lost and is not to return."""
        self.returning.pop(instance_id, None)
        self._remove(instance_id)

    def run(self, instance_ids: Iterable[InstanceId], batch_id: int | None) -> None:
        """Show that these instances are members of a batch, or of none."""
        for instance_id in instance_ids:
            self.instances[instance_id] = self.instances[instance_id].running(batch_id)

    def are_busy(self, instance_ids: Iterable[InstanceId]) -> bool:
        """Return whether each of these instances has a batch."""
        return all(self.instances[i].batch_id is not None for i in instance_ids)

    def keeps(self, instance_id: InstanceId) -> bool:
        """Return whether KV stays on an instance when nobody reads it, until its room is needed."""
        instance = self.instances.get(instance_id)
        return instance is not None and not instance.is_draining

    def serves(self, instance_id: InstanceId) -> bool:
        """Return whether requests can read KV on an instance."""
        return self.instances[instance_id].kind is not InstanceKind.HOST

    def reserve(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Count slots of each instance as used."""
        for instance_id, count in num_tokens.items():
            self._use(instance_id, count)

    def release(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Count slots of each instance as free."""
        for instance_id, count in num_tokens.items():
            self._use(instance_id, -count)

    def keep(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Count slots in use as cached, since no request reads them any more; below 0, the other way."""
        for instance_id, count in num_tokens.items():
            instance = self.instances[instance_id]
            self.instances[instance_id] = instance.holding(
                instance.kv_used - count, instance.kv_cached + count
            )
            if instance_id in self.free:
                self.free[instance_id] += count

    def forget(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Count cached slots as empty."""
        for instance_id, count in num_tokens.items():
            instance = self.instances[instance_id]
            self.instances[instance_id] = instance.holding(instance.kv_used, instance.kv_cached - count)

    def _use(self, instance_id: InstanceId, num_tokens: int) -> None:
        instance = self.instances[instance_id]
        self.instances[instance_id] = instance.using(instance.kv_used + num_tokens)
        if instance_id in self.free:
            self.free[instance_id] -= num_tokens

    def _remove(self, instance_id: InstanceId) -> None:
        for by_id in (self.instances, self.pools, self.free):
            by_id.pop(instance_id, None)
