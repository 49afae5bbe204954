"""The cluster as a policy sees it: values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, KVMigration, LeaseExtension
from loong.core.request import RequestId, RequestView
from loong.core.value import value

EXTENSION_STEPS = 8  # before the end of a lease a policy is asked whether it is to go on


@value
class RunningBatch:
    """A batch in flight.

    `started_at` is predicted until the batch `has_started`. `stepped_at` is when the step that runs now
    began, as the tokens of the one before told. `last_step` is the step before which its lease is to end. A
    group that hears of it too late goes beyond, but never beyond `plan.num_steps`. `holder_ids` are the
    instances outside its group that serve it, as the placements at its beginning say.
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
        """Whether it is a lease that nobody ends early, and that its group can still hear of more steps."""
        return 1 < self.plan.num_steps == self.last_step > self.num_steps_taken + 1

    @property
    def can_end_early(self) -> bool:
        """Whether it would take more steps than the one that runs now."""
        return self.num_steps_taken + 1 < self.last_step

    @property
    def is_ending(self) -> bool:
        """Whether it is time to extend the lease, if that is wished, for the group to hear of it."""
        return self.num_steps_taken >= self.plan.num_steps - EXTENSION_STEPS and self.is_extendable

    @property
    def step_ends_at(self) -> float:
        """When the step that runs now is to end, as far as is planned."""
        return self.stepped_at + (self.plan.predicted_time or 0.0)

    def after(self, step: int, time: float) -> "RunningBatch":
        """The same batch when it has taken `step`, as told at `time`."""
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
    """Counts since the start. Those that failed have ended, too.

    A scale-up is a batch on more instances than any of its requests had in the batch before, a scale-down one
    on fewer than one of them had. Retained tokens are those kept by another instance than the one that
    computed them, computed tokens those of which KV was made, prompts' and outputs'.
    """

    num_arrived: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_scale_ups: int = 0
    num_scale_downs: int = 0
    num_retained_tokens: int = 0
    num_migrated_tokens: int = 0
    num_preemptions: int = 0
    num_batches_by_dop: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """All that a policy may know.

    Waiting requests have no KV, and are in order of arrival; running ones have, or are in a batch, and are in
    the order in which they began. `recent_prompt_lengths` are those of the last arrivals, latest last: the
    best guess at what comes next. `version` is that of the state: each event and each plan makes another.

    Batches that are `ending` run as well, but all else is as it will be when they have ended as predicted,
    but for the room that then comes free: `leaving` is what is held by requests that end with them, of which
    there are no views. What is planned for their instances begins after them.
    """

    now: float
    instances: tuple[ElasticInstance, ...]
    waiting: tuple[RequestView, ...] = ()
    running: tuple[RequestView, ...] = ()
    batches: tuple[RunningBatch, ...] = ()
    migrations: tuple[KVMigration, ...] = ()
    stats: ClusterStats = field(default_factory=ClusterStats)
    recent_prompt_lengths: tuple[int, ...] = ()
    version: int = 0
    ending: tuple[RunningBatch, ...] = ()
    leaving: Mapping[InstanceId, int] = field(default_factory=dict)

    @cached_property
    def instance(self) -> dict[InstanceId, ElasticInstance]:
        """Instances by id."""
        return {instance.instance_id: instance for instance in self.instances}

    @cached_property
    def request(self) -> dict[RequestId, RequestView]:
        """Live requests by id."""
        return {view.request_id: view for view in (*self.waiting, *self.running)}

    @cached_property
    def pools(self) -> dict[InstanceId, int]:
        """Slots of the full instances by id, free or not."""
        return {i.instance_id: i.kv_capacity for i in self.instances if i.kind is InstanceKind.FULL}

    @cached_property
    def free(self) -> dict[InstanceId, int]:
        """Free slots of the full instances by id."""
        return {i.instance_id: i.kv_free for i in self.instances if i.kind is InstanceKind.FULL}

    @cached_property
    def most_tokens(self) -> int:
        """So many tokens, or fewer, is the KV of what any live request and its siblings come to."""
        return max((view.num_final_tokens for view in (*self.waiting, *self.running)), default=0)

    @cached_property
    def batch(self) -> dict[int, RunningBatch]:
        """Batches in flight by id."""
        return {batch.batch_id: batch for batch in self.batches}

    def extended(self, extension: LeaseExtension) -> BatchPlan:
        """What a running lease becomes: those of its requests that have not ended go on."""
        plan = self.batch[extension.batch_id].plan
        views = (self.request[request_id] for request_id in plan.request_ids)
        stops = {v.request_id: v.num_prompt_tokens + v.max_tokens - 1 for v in views if not v.has_ended}
        return plan.lengthened(extension.num_steps, stops)

    @cached_property
    def served(self) -> dict[InstanceId, tuple[RunningBatch, ...]]:
        """The batches in flight that each holder outside their groups serves; nothing for others."""
        served: dict[InstanceId, tuple[RunningBatch, ...]] = {}
        for batch in (*self.batches, *self.ending):
            for instance_id in batch.holder_ids:
                served[instance_id] = (*served.get(instance_id, ()), batch)
        return served

    @cached_property
    def predicted_ends(self) -> dict[InstanceId, float]:
        """When the batches that are ending leave their instances."""
        return {
            instance_id: batch.step_ends_at
            for batch in self.ending
            for instance_id in batch.plan.group.instance_ids
        }

    @cached_property
    def ending_ids(self) -> frozenset[RequestId]:
        """Requests of batches that are ending."""
        return frozenset(request_id for batch in self.ending for request_id in batch.plan.request_ids)

    @property
    def kv_capacity(self) -> int:
        """Tokens of KV that all instances hold; host tiers do not count."""
        return sum(i.kv_capacity for i in self.instances if i.kind is not InstanceKind.HOST)

    @property
    def kv_used(self) -> int:
        """Tokens of it that are in use or reserved."""
        return sum(i.kv_used for i in self.instances if i.kind is not InstanceKind.HOST)
