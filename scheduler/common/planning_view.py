"""A snapshot sorted for planning: free slots, waiting prompts, and sets of instances with their requests.

Instances that share a request not in flight are one instance set, for policies whose batches hold all KV of
their requests. So are the instances of a batch in flight, which become free together. All others are single
instances.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from loong.core.placement import InstanceId, tokens_by_instance
from loong.core.request import RequestView
from loong.core.snapshot import RunningBatch, Snapshot
from loong.scheduler.common.prompt_queue import PromptQueue
from loong.scheduler.common.request_lengths import Lengths


@dataclass(slots=True)
class InstanceSet:
    """Instances that share requests, and those of their requests that are not in flight.

    `batches` are those in flight on it, except one that is ending.
    """

    instance_ids: tuple[InstanceId, ...]
    batches: tuple[RunningBatch, ...] = ()
    decodes: list[RequestView] = field(default_factory=list)
    prefills: list[RequestView] = field(default_factory=list)

    @classmethod
    def of_batch(cls, batch: RunningBatch, full: Container[InstanceId]) -> "InstanceSet":
        """Return the `full` instances on which a batch runs."""
        instance_ids = batch.plan.group.instance_ids
        if len(instance_ids) > 1 or instance_ids[0] not in full:
            instance_ids = tuple(sorted(filter(full.__contains__, instance_ids)))
        return cls(instance_ids, (batch,))

    @property
    def is_ready(self) -> bool:
        """Return whether a plan can use it now."""
        return not self.batches

    @property
    def is_in_lease(self) -> bool:
        """Return whether all batches that it waits for can end at a step boundary."""
        return bool(self.batches) and all(batch.plan.num_steps > 1 for batch in self.batches)


@dataclass(frozen=True)
class PlanningView:
    """The cluster, sorted for planning.

    `capacity` is the slots of all instances, and `free` the free ones of each full one, once requests that
    have ended leave their batches. The rest is computed on demand: instance sets `occupied` by KV of requests
    not in flight, and other sets `running` a batch. Of `idle` instances, those of a host are together, and
    those with most room first.

    A request that needs more KV than all instances have is not in `waiting`, so that it delays no other: it
    has failed, or waits for a first instance.
    """

    snapshot: Snapshot
    capacity: int
    free: dict[InstanceId, int]
    waiting: tuple[RequestView, ...]

    @property
    def num_instances(self) -> int:
        """Return the number of full instances, idle or not."""
        return len(self.free)

    @property
    def begun(self) -> tuple[RequestView, ...]:
        """Return the prompts not in flight that have been begun."""
        return tuple(view for instance_set in self.occupied for view in instance_set.prefills)

    @property
    def decodes(self) -> tuple[RequestView, ...]:
        """Return the decoding requests not in flight."""
        return tuple(view for instance_set in self.occupied for view in instance_set.decodes)

    @property
    def queue(self) -> PromptQueue:
        """Return the prompts not in flight, and what their order and admission depend on."""
        snapshot = self.snapshot
        return PromptQueue(
            snapshot.now, self.num_instances, self.capacity, self.waiting, self.begun, snapshot.running
        )

    @property
    def is_quiet(self) -> bool:
        """Return whether no prompt waits, begun or not, except those in a step."""
        return not (self.waiting or self.begun)

    @property
    def instance_sets(self) -> tuple[InstanceSet, ...]:
        """Return all instance sets: every full instance is in one."""
        return (*self.occupied, *self.running, *(InstanceSet((i,)) for i in self.idle))

    @cached_property
    def occupied(self) -> tuple[InstanceSet, ...]:
        """Return the instance sets that hold KV of requests not in flight.

        Requests with KV on anything that does not serve, such as a host tier, are left out.
        """
        views = [view for view in self.snapshot.running if view.batch_id is None and view.is_plannable]
        if len(self.free) < len(self.snapshot.instances):
            serving = self.free.keys() | self.snapshot.memory_free.keys()
            views = [view for view in views if serving >= set(view.placement.instance_ids)]
        return _occupied_sets(views, self.snapshot, self.free)

    @cached_property
    def lengths(self) -> Lengths:
        """Return the lengths of the requests that hold slots, or may get some, and have not ended."""
        return Lengths.of([view for view in self.snapshot.running if not view.has_ended])

    @cached_property
    def running(self) -> tuple[InstanceSet, ...]:
        """Return the instance sets of batches in flight without KV of other requests."""
        instance_sets = (InstanceSet.of_batch(batch, self.free) for batch in self.snapshot.batches)
        return tuple(
            u for u in instance_sets if u.instance_ids and self._joined_ids.isdisjoint(u.instance_ids)
        )

    @cached_property
    def idle(self) -> tuple[InstanceId, ...]:
        """Return the idle instances without KV of requests."""
        idle = [i.instance_id for i in self.snapshot.instances if i.batch_id is None]
        idle = [i for i in idle if i in self.free and i not in self._joined_ids]
        instances = self.snapshot.instance
        return tuple(sorted(idle, key=lambda i: (instances[i].host_id, -self.free[i])))

    @cached_property
    def _joined_ids(self) -> frozenset[InstanceId]:
        return frozenset(i for instance_set in self.occupied for i in instance_set.instance_ids)


def make_planning_view(snapshot: Snapshot) -> PlanningView:
    """Return the view of a snapshot, which may be that of a part of a cluster."""
    free = snapshot.free.copy()
    capacity = sum(snapshot.pools.values()) + sum(snapshot.memory_pools.values())
    for view in [view for view in snapshot.running if view.has_ended and view.batch_id in snapshot.batch]:
        _free_kv_of(view, snapshot, free)
    waiting = [v for v in snapshot.waiting if not (v.is_migrating or v.has_ended)]  # none is in a batch
    if snapshot.most_tokens > capacity:
        waiting = [view for view in waiting if view.num_final_tokens <= capacity]
    return PlanningView(snapshot, capacity, free, tuple(waiting))


def _free_kv_of(view: RequestView, snapshot: Snapshot, free: dict[InstanceId, int]) -> None:
    """Count the KV of a request that has ended, but waits for its batch to end, as free.

    That holds for members of its group, which no plan can use before. A holder may have to store KV now.
    """
    assert view.batch_id is not None, "it is in a batch"
    plan = snapshot.batch[view.batch_id].plan
    freed = Counter(view.own_tokens_by_instance()) + tokens_by_instance(plan.writes_of(view.request_id))
    for instance_id, num_tokens in freed.items():
        if instance_id in free and instance_id in plan.group.instance_ids:
            free[instance_id] += num_tokens


def _occupied_sets(
    occupied: Iterable[RequestView], snapshot: Snapshot, full: Mapping[InstanceId, int]
) -> tuple[InstanceSet, ...]:
    """Return the instance sets with KV of these requests, or any one for a request without KV there."""
    set_of: dict[InstanceId, InstanceSet] = {}
    for view in occupied:
        holders = tuple(filter(full.__contains__, view.placement.instance_ids)) or tuple(full)[:1]
        for instance_id in holders:
            if instance_id not in set_of:
                instance_set = _set_at(instance_id, snapshot, full)
                set_of.update(dict.fromkeys(instance_set.instance_ids, instance_set))
        instance_set = set_of[holders[0]]
        if len(holders) > 1 and any(set_of[i] is not instance_set for i in holders):
            instance_set = _joined({id(set_of[i]): set_of[i] for i in holders}.values())
            set_of.update(dict.fromkeys(instance_set.instance_ids, instance_set))
        if view.is_decoding:
            instance_set.decodes.append(view)
        else:
            instance_set.prefills.append(view)
    return tuple({id(instance_set): instance_set for instance_set in set_of.values()}.values())


def _set_at(instance_id: InstanceId, snapshot: Snapshot, full: Container[InstanceId]) -> InstanceSet:
    """Return an instance, with those on which its batch runs."""
    batch_id = snapshot.instance[instance_id].batch_id
    if batch_id is None:
        return InstanceSet((instance_id,))
    return InstanceSet.of_batch(snapshot.batch[batch_id], full)


def _joined(parts: Collection[InstanceSet]) -> InstanceSet:
    """Merge instance sets into one."""
    return InstanceSet(
        tuple(sorted(i for part in parts for i in part.instance_ids)),
        tuple(batch for part in parts for batch in part.batches),
        [view for part in parts for view in part.decodes],
        [view for part in parts for view in part.prefills],
    )
