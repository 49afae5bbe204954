"""The cluster as a policy sees it: values only."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from loong.core.instance import ElasticInstance, InstanceKind, Service
from loong.core.output_lengths import LengthCounts
from loong.core.placement import InstanceId, KVSegment, OwnerId, OwnerView, tokens_by_instance
from loong.core.plan import (
    BatchPlan,
    Borrowing,
    IterationPlan,
    KVMigration,
    LeaseExtension,
    PreemptionReason,
)
from loong.core.positions import common, subtract
from loong.core.request import RequestId, RequestView
from loong.core.value import value

EXTENSION_STEPS = 8  # before the end of a lease, the policy plans whether to extend it


@value
class RunningBatch:
    """A batch in flight.

    `started_at` is predicted until the batch `has_started`. `stepped_at` is when the present step began, by
    the event with the previous step's tokens. `last_step` is the step before which its lease is to end. A
    group that receives this too late takes more steps, but never more than `plan.num_steps`. `holder_ids` are
    the instances outside its group that serve it, as the placements at its beginning say.
    """

    batch_id: int
    plan: BatchPlan
    started_at: float
    num_steps_taken: int
    last_step: int
    stepped_at: float
    has_started: bool = False
    holder_ids: tuple[InstanceId, ...] = ()

    @property
    def participant_ids(self) -> tuple[InstanceId, ...]:
        """All instances that have a part in it: members, then holders."""
        return (*self.plan.group.instance_ids, *self.holder_ids)

    @property
    def is_extendable(self) -> bool:
        """Return whether it is a lease without an early end that can still be extended in time."""
        return 1 < self.plan.num_steps == self.last_step > self.num_steps_taken + 1

    @property
    def can_end_early(self) -> bool:
        """Return whether it would take more steps than the present one."""
        return self.num_steps_taken + 1 < self.last_step

    @property
    def is_ending(self) -> bool:
        """Return whether it is time to extend the lease, so that the group receives this before the end."""
        return self.num_steps_taken >= self.plan.num_steps - EXTENSION_STEPS and self.is_extendable

    @property
    def step_ends_at(self) -> float:
        """Return when the present step is planned to end."""
        return self.stepped_at + (self.plan.predicted_time or 0.0)

    def after(self, step: int, time: float) -> "RunningBatch":
        """Return the same batch after `step`, by an event at `time`."""
        return RunningBatch(
            self.batch_id,
            self.plan,
            self.started_at,
            step + 1,
            self.last_step,
            time,
            self.has_started,
            self.holder_ids,
        )


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """Counts since the start. Failed requests have ended, too.

    Scale-ups, scale-downs and hand-overs are batches with a `GroupChange` of one of their requests. Retained
    tokens are kept by another instance of the group than the one that computed them. Pushed ones are kept
    outside of the group, and migrated ones were moved later; memory tokens are those of
    them that went to memory instances. Copied ones, of KV that several requests may
    read, stay where they were, too. Offloaded ones were copied to a host tier, and loaded ones from there.
    Switched ones are read from another copy than before, which is gone or to go. Of window-dropped ones,
    layers with a window have no KV any more, and the others have. Served tokens are KV outside
    a batch's group that its queries read. Relayed ones are KV that a batch reads once for several requests,
    counted for each of these but one. A lease counts both once. Program calls are those of the batching
    program.

    Computed tokens are those whose KV was made, of prompts and outputs. Losses, joins and leaves are of
    instances; those at the start are no joins. Recomputed tokens, some of the computed ones, are those whose
    KV had been evicted, or lost with an instance. Cached tokens are borrowed from other owners instead. Times
    are in seconds.
    """

    num_arrived: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_output_tokens: int = 0
    num_scale_ups: int = 0
    num_scale_downs: int = 0
    num_hand_overs: int = 0
    num_retained_tokens: int = 0
    num_pushed_tokens: int = 0
    num_migrated_tokens: int = 0
    num_memory_tokens: int = 0
    num_copied_tokens: int = 0
    num_offloaded_tokens: int = 0
    num_loaded_tokens: int = 0
    num_switched_tokens: int = 0
    num_window_dropped_tokens: int = 0
    num_served_tokens: int = 0
    num_relayed_tokens: int = 0
    num_leases: int = 0
    num_group_leases: int = 0
    num_multi_master_leases: int = 0
    num_served_leases: int = 0
    num_micro_batched_leases: int = 0
    num_program_calls: int = 0
    num_program_calls_of_several: int = 0  # prompts
    busy_seconds: float = 0.0
    two_prompt_groups_seconds: float = 0.0
    num_cached_tokens: int = 0
    num_losses: int = 0
    num_joins: int = 0
    num_leaves: int = 0
    num_batches_by_dop: Mapping[int, int] = field(default_factory=dict)
    num_preemptions_by_reason: Mapping[PreemptionReason, int] = field(default_factory=dict)

    @property
    def num_preemptions(self) -> int:
        """The number of all preemptions."""
        return sum(self.num_preemptions_by_reason.values())


@dataclass(frozen=True)
class Snapshot:
    """The state that a policy plans from.

    Waiting requests have no KV, and are in order of arrival. Running ones have KV or are in a batch, and are
    in the order in which they began. `version` is that of the state: each event and each plan makes another.

    `ending` are batches still running whose end is predicted. The snapshot already shows the state after
    them, except that the KV they free (`leaving`) is not yet available. That KV belongs to requests that end
    with these batches and have no view. Batches planned for their instances begin after them.

    `returning` are the slots of full instances that were lost and are being started again, `returning_memory`
    those of memory instances. Instances that are draining have no part in `pools` and `free`. `lent` are the
    slots that full instances have lent to other engines, and no longer have.

    Requests that are `following` another wait for KV that it computes first; no plan can name them.
    `output_lengths` count the outputs that ended by themselves, by the class of their declared maximum.

    `owners` have KV of tokens that live requests have too. A plan may copy or move it, and evict what of it
    nothing reads. `copies` are the migrations of their KV, and `migrations` those of requests. `unsaved` is
    some KV of owners that nobody reads, by instance, which its host tier lacks; `owners` has its owners.

    If layers with a window have less memory, the largest is `window`. Each instance has room in them for
    `window_free` tokens besides those that requests still need.
    """

    now: float
    instances: tuple[ElasticInstance, ...]
    waiting: tuple[RequestView, ...] = ()
    running: tuple[RequestView, ...] = ()
    batches: tuple[RunningBatch, ...] = ()
    migrations: tuple[KVMigration, ...] = ()
    stats: ClusterStats = field(default_factory=ClusterStats)
    version: int = 0
    ending: tuple[RunningBatch, ...] = ()
    leaving: Mapping[InstanceId, int] = field(default_factory=dict)
    returning: Mapping[InstanceId, int] = field(default_factory=dict)
    following: tuple[RequestView, ...] = ()
    output_lengths: Mapping[int, LengthCounts] = field(default_factory=dict)
    owners: Mapping[OwnerId, OwnerView] = field(default_factory=dict)
    copies: tuple[KVMigration, ...] = ()
    unsaved: Mapping[InstanceId, tuple[KVSegment, ...]] = field(default_factory=dict)
    returning_memory: Mapping[InstanceId, int] = field(default_factory=dict)
    lent: Mapping[InstanceId, int] = field(default_factory=dict)
    window: int = 0
    window_free: Mapping[InstanceId, int] = field(default_factory=dict)

    @cached_property
    def instance(self) -> dict[InstanceId, ElasticInstance]:
        """Return instances by id."""
        return {instance.instance_id: instance for instance in self.instances}

    @cached_property
    def request(self) -> dict[RequestId, RequestView]:
        """Return live requests by id."""
        return {view.request_id: view for view in (*self.waiting, *self.running)}

    @cached_property
    def pools(self) -> dict[InstanceId, int]:
        """Return the slots of the full instances by id, free or not."""
        return {i.instance_id: i.kv_capacity for i in self.instances if _is_full(i)}

    @cached_property
    def services(self) -> frozenset[Service]:
        """Return what instances serve, each kind once."""
        return frozenset(i.serves for i in self.instances if _is_full(i) or _is_memory(i))

    @cached_property
    def num_served_leases(self) -> Counter[InstanceId]:
        """Return the running leases that each instance serves for groups without it."""
        return Counter(i for b in self.batches if b.plan.num_steps > 1 for i in b.holder_ids)

    def takes_lease(self, instance_id: InstanceId, num_planned: int = 0) -> bool:
        """Return whether an instance can serve one more decode lease of others, besides those planned now."""
        return self.instance[instance_id].takes_lease(self.num_served_leases[instance_id] + num_planned)

    @cached_property
    def tiers(self) -> dict[InstanceId, InstanceId]:
        """Return the host tier of each full instance that has one."""
        return {i.tier_of: i.instance_id for i in self.instances if i.tier_of in self.pools}

    @cached_property
    def num_hosts(self) -> int:
        """Return the number of hosts that have instances."""
        return len({i.host_id for i in self.instances})

    @cached_property
    def free(self) -> dict[InstanceId, int]:
        """Return the free slots of the full instances by id."""
        return {i.instance_id: i.kv_free for i in self.instances if _is_full(i)}

    @cached_property
    def memory_free(self) -> dict[InstanceId, int]:
        """Return the free slots of the memory instances by id."""
        return {i.instance_id: i.kv_free for i in self.instances if _is_memory(i)}

    @cached_property
    def memory_pools(self) -> dict[InstanceId, int]:
        """Return the slots of the memory instances by id, free or not."""
        return {i.instance_id: i.kv_capacity for i in self.instances if _is_memory(i)}

    @cached_property
    def most_tokens(self) -> int:
        """Return a bound on the KV tokens that any live request and its siblings need until their ends."""
        return max((view.num_final_tokens for view in (*self.waiting, *self.running)), default=0)

    @cached_property
    def batch(self) -> dict[int, RunningBatch]:
        """Return batches in flight by id."""
        return {batch.batch_id: batch for batch in self.batches}

    def after(self, plan: IterationPlan) -> "Snapshot":
        """Return it as it is once the requests of a plan's batches have borrowed what the plan says."""
        if not (borrowings := plan.effective_borrowings):
            return self
        views = {b.request_id: replace(self.request[b.request_id], cached=()) for b in borrowings}
        views = {b.request_id: views[b.request_id].borrowing(b.segments) for b in borrowings}
        taken = self._unread_tokens(borrowings)
        instances = tuple(
            i.holding(i.kv_used + taken[i.instance_id], i.kv_cached - taken[i.instance_id])
            for i in self.instances
        )
        return replace(
            self, instances=instances, waiting=tuple([views.get(v.request_id, v) for v in self.waiting])
        )

    def emptied(self) -> "Snapshot":
        """Return it with its counts, but without requests, batches and KV, as after a failure."""
        return replace(
            self,
            instances=tuple(instance.holding(0, 0).running(None) for instance in self.instances),
            waiting=(),
            running=(),
            batches=(),
            ending=(),
            leaving={},
            migrations=(),
            following=(),
            owners={},
            copies=(),
            unsaved={},
        )

    def read_tokens_to_borrow(self, plan: IterationPlan) -> Counter[InstanceId]:
        """Return the tokens on each instance that a plan's requests borrow, and that others read already."""
        borrowings = plan.effective_borrowings
        tokens: Counter[InstanceId] = Counter()
        for borrowing in borrowings:
            tokens.update(tokens_by_instance(borrowing.segments))
        tokens.subtract(self._unread_tokens(borrowings))
        return tokens

    def _unread_tokens(self, borrowings: Iterable[Borrowing]) -> Counter[InstanceId]:
        """Return the tokens on each instance that are borrowed, and that no request reads before."""
        unread: dict[tuple[OwnerId, InstanceId], tuple[range, ...]] = {}
        for borrowing in borrowings:
            cached = [c.segment for c in self.request[borrowing.request_id].cached if not c.is_read]
            for owner_id, positions, instance_id in borrowing.segments:
                place = owner_id, instance_id
                mine = [s.positions for s in cached if (s.owner_id, s.instance_id) == place]
                before = unread.get(place, ())
                unread[place] = (*before, *subtract(common((positions,), *mine), *before))
        taken: Counter[InstanceId] = Counter()
        for (_, instance_id), ranges in unread.items():
            taken[instance_id] += sum(map(len, ranges))
        return taken

    def extended(self, extension: LeaseExtension) -> BatchPlan:
        """Return the extended plan of a running lease: its requests that have not ended go on."""
        plan = self.batch[extension.batch_id].plan
        views = (self.request[request_id] for request_id in plan.request_ids)
        stops = {v.request_id: v.num_prompt_tokens + v.max_tokens - 1 for v in views if not v.has_ended}
        return plan.lengthened(extension.num_steps, stops)

    @cached_property
    def predicted_ends(self) -> dict[InstanceId, float]:
        """Return when the batches that are ending leave their instances."""
        return {
            instance_id: batch.step_ends_at
            for batch in self.ending
            for instance_id in batch.plan.group.instance_ids
        }

    @cached_property
    def ending_ids(self) -> frozenset[RequestId]:
        """Return the requests of batches that are ending."""
        return frozenset(request_id for batch in self.ending for request_id in batch.plan.request_ids)

    @property
    def draining_ids(self) -> frozenset[InstanceId]:
        """Return the instances that are to leave."""
        return frozenset(i.instance_id for i in self.instances if i.is_draining)

    @property
    def drained_ids(self) -> frozenset[InstanceId]:
        """Return those of them that hold nothing and have no part in anything in flight."""
        empty = frozenset(i.instance_id for i in self.instances if i.is_draining and not i.kv_used)
        if not empty:
            return empty
        in_flight = {i for batch in (*self.batches, *self.ending) for i in batch.participant_ids}
        moving = ((m.segment.instance_id, m.destination_id) for m in (*self.migrations, *self.copies))
        return empty.difference(in_flight, *moving)

    @property
    def is_anything_in_flight(self) -> bool:
        """Return whether an event will come even without a plan."""
        return bool(self.batches or self.ending or self.migrations or self.copies)

    @property
    def kv_capacity(self) -> int:
        """Return the tokens of KV that all instances hold; host tiers do not count."""
        return sum(i.kv_capacity for i in self.instances if i.kind is not InstanceKind.HOST)

    @property
    def kv_used(self) -> int:
        """Return the tokens of it that are in use or reserved."""
        return sum(i.kv_used for i in self.instances if i.kind is not InstanceKind.HOST)


def _is_full(instance: ElasticInstance) -> bool:
    return instance.kind is InstanceKind.FULL and not instance.is_draining


def _is_memory(instance: ElasticInstance) -> bool:
    return instance.kind is InstanceKind.ATTENTION and not instance.is_draining
