"""The instances of a cluster, and the slots of their pools that are in use."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from loong.core.errors import InvalidEventError
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import InstanceId, OwnerId


@dataclass(slots=True)
class PoolLedger:
    """Instances, of which `kv_used` counts KV and the slots that batches and migrations have reserved.

    `pools` and `free` are those of a snapshot, so that no plan looks at every instance for them; `returning`
    and `returning_memory` are the slots of lost instances that are being started again. `lent` has the
    instance and the slots of each loan to another engine, which are no part of the capacity. `taken`
    counts all slots that were ever reserved.
    """

    instances: dict[InstanceId, ElasticInstance] = field(default_factory=dict)
    pools: dict[InstanceId, int] = field(default_factory=dict)
    free: dict[InstanceId, int] = field(default_factory=dict)
    returning: dict[InstanceId, int] = field(default_factory=dict)
    returning_memory: dict[InstanceId, int] = field(default_factory=dict)
    lent: dict[OwnerId, tuple[InstanceId, int]] = field(default_factory=dict)
    taken: Counter[InstanceId] = field(default_factory=Counter)

    def lend(self, loan_id: OwnerId, instance_id: InstanceId, num_tokens: int) -> bool:
        """Take free slots out of an instance's pool. Return whether it is there and has these."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.kv_free < num_tokens or loan_id in self.lent:
            return False
        self.lent[loan_id] = instance_id, num_tokens
        self._resize(instance, -num_tokens)
        return True

    def take_back(self, loan_id: OwnerId) -> InstanceId | None:
        """Return the slots of a loan to its instance, and return that. None if it was lost, or has left."""
        instance_id, num_tokens = self.lent.pop(loan_id, (None, 0))
        if instance_id is not None:
            self._resize(self.instances[instance_id], num_tokens)
        return instance_id

    def lent_tokens(self) -> Counter[InstanceId]:
        """Return the slots that each instance has lent."""
        found: Counter[InstanceId] = Counter()
        for instance_id, num_tokens in self.lent.values():
            found[instance_id] += num_tokens
        return found

    def _resize(self, instance: ElasticInstance, num_more: int) -> None:
        instance_id = instance.instance_id
        self.instances[instance_id] = replace(instance, kv_capacity=instance.kv_capacity + num_more)
        if instance_id in self.pools:
            self.pools[instance_id] += num_more
            self.free[instance_id] += num_more

    def join(self, instance: ElasticInstance) -> None:
        """Add a new instance. Raises `InvalidEventError` if it is there, or is not empty."""
        if instance.instance_id in self.instances:
            raise InvalidEventError(f"instance {instance.instance_id} joined twice")
        if instance.kv_used or instance.batch_id is not None:
            raise InvalidEventError(
                f"instance {instance.instance_id} joined with {instance.kv_used} tokens and batch "
                f"{instance.batch_id}; it must come empty"
            )
        self._stop_waiting_for(instance.instance_id)
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
        instance = self.instances[instance_id]
        if returns and instance.kind is InstanceKind.FULL:
            self.returning[instance_id] = instance.kv_capacity + self.lent_tokens()[instance_id]
        elif returns and instance.kind is InstanceKind.ATTENTION:
            self.returning_memory[instance_id] = instance.kv_capacity
        self._remove(instance_id)

    def leave(self, instance_id: InstanceId) -> None:
        """Remove an instance that has nothing, or that was lost and is not to return."""
        self._stop_waiting_for(instance_id)
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
            if count:
                self._use(instance_id, count)

    def release(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Count slots of each instance as free."""
        for instance_id, count in num_tokens.items():
            if count:
                self._use(instance_id, -count)

    def keep(self, num_tokens: Mapping[InstanceId, int]) -> None:
        """Count slots in use as cached, since no request reads them any more; below 0, the other way."""
        for instance_id, count in num_tokens.items():
            if not count:
                continue
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
        if num_tokens > 0:
            self.taken[instance_id] += num_tokens
        self.instances[instance_id] = instance.using(instance.kv_used + num_tokens)
        if instance_id in self.free:
            self.free[instance_id] -= num_tokens

    def _stop_waiting_for(self, instance_id: InstanceId) -> None:
        self.returning.pop(instance_id, None)
        self.returning_memory.pop(instance_id, None)

    def _remove(self, instance_id: InstanceId) -> None:
        for by_id in (self.instances, self.pools, self.free):
            by_id.pop(instance_id, None)
        self.lent = {loan_id: loan for loan_id, loan in self.lent.items() if loan[0] != instance_id}
