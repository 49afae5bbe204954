"""A plan in the making, which goes through stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, LeaseEnd, Preemption
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.common.planning_view import PlanningView
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.prompt_order import Order, Ordering, PrefillCandidate, by_deadline


@dataclass(frozen=True)
class Variant:
    """The parts that a variant of `esp` has. `esp` itself has all: variants measure the value of each.

    Prompts go in `order`, in chunks, and short ones on instances of their own. Decodes run apart from
    prompts, spread over as many instances as meet their targets. Those with too long a context for one have
    several masters. A late prompt, the guest, takes pauses of decodes. KV of prompts moves to them
    where that pays, ahead of their first steps. Prefixes that others wait to read are copied. KV of decodes
    goes to memory instances where that pays. A group that `is_fixed` is always whole.
    """

    order: Order = by_deadline
    has_chunks: bool = True
    has_lone_instances: bool = True
    has_apart: bool = True
    has_copies: bool = True
    has_moves: bool = True
    has_proactive: bool = True
    has_light_apart: bool = True
    has_guests: bool = True
    has_spread: bool = True
    has_masters: bool = True
    has_memory: bool = True
    is_fixed: bool = False


@dataclass(frozen=True)
class PlanDraft:
    """A plan in the making. Each stage returns a draft that says more.

    Admission gives `prefills`, most urgent first. Of late ones, some are `paused_late` while others have
    enough work. `decodes` are those not in flight that may take steps, in leases of up to `lease_steps`
    steps. `long` are others, with too long a context for one instance. `prompt_ids` are the instances that
    compute prompts: all, whose steps then have decodes too, or those apart from decodes.
    """

    view: PlanningView
    cost_model: CostModel
    config: PolicyConfig
    variant: Variant
    ordering: Ordering
    prefills: tuple[PrefillCandidate, ...] = ()
    paused_late: tuple[PrefillCandidate, ...] = ()
    decodes: tuple[RequestView, ...] = ()
    long: tuple[RequestView, ...] = ()
    lease_steps: int = 0
    prompt_ids: tuple[InstanceId, ...] = ()
    batches: tuple[BatchPlan, ...] = ()
    migrations: tuple[KVMigration, ...] = ()
    lease_ends: tuple[LeaseEnd, ...] = ()
    preempted: tuple[RequestView, ...] = ()
    decisions: tuple[Decision, ...] = ()

    @property
    def snapshot(self) -> Snapshot:
        """Return the snapshot that it plans for."""
        return self.view.snapshot

    @cached_property
    def everywhere(self) -> tuple[InstanceId, ...]:
        """All full instances."""
        return tuple(sorted(self.view.free))

    @cached_property
    def is_roomy(self) -> bool:
        """True if all live requests fit at their declared ends."""
        live = (view for view in self.snapshot.request.values() if not view.has_ended)
        return sum(view.num_final_tokens for view in live) <= self.view.capacity

    @cached_property
    def idle_ids(self) -> frozenset[InstanceId]:
        """The full instances that run nothing."""
        return frozenset(i for i in self.view.free if self.snapshot.instance[i].batch_id is None)

    @cached_property
    def batch_of(self) -> Mapping[RequestId, BatchPlan]:
        """The planned batches by each of their requests."""
        return {request_id: batch for batch in self.batches for request_id in batch.request_ids}

    def plan(self) -> IterationPlan:
        """Return the plan."""
        return IterationPlan(
            batches=self.batches,
            migrations=self.migrations,
            preemptions=tuple(Preemption(view.request_id) for view in self.preempted),
            lease_ends=self.lease_ends,
            decisions=self.decisions,
        )
