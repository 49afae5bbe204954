"""Policies by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, takewhile
from re import fullmatch
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.decision import DecisionKind
from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan
from loong.core.similar_words import meant
from loong.core.snapshot import Snapshot
from loong.scheduler.baselines.disaggregated import max_tokens_moved, plan_disaggregated
from loong.scheduler.baselines.esp_disaggregated import (
    max_tokens_of_parts,
    parts_by_role,
    plan_esp_disaggregated,
)
from loong.scheduler.baselines.esp_fixed import plan_esp_fixed
from loong.scheduler.baselines.fixed_groups import memory_in_use, one_group, one_per_instance
from loong.scheduler.baselines.fixed_policy import LIGHTLLM, SPLIT_FUSE, WHOLE_PROMPTS, plan_fixed_groups
from loong.scheduler.common.cluster_parts import Parts, groups_of
from loong.scheduler.common.draining import Draining
from loong.scheduler.common.expected_lengths import as_admitted, relieving
from loong.scheduler.common.fragments import drop_fragments
from loong.scheduler.common.host_tier import HostTier
from loong.scheduler.common.lease_extensions import extending
from loong.scheduler.common.leases import first_ends
from loong.scheduler.common.leaving_memory import LeavingMemory
from loong.scheduler.common.oversized import fail_stranded, preempt_oversized, without_oversized
from loong.scheduler.common.suspects import isolating
from loong.scheduler.config import AdmissionRule, PolicyConfig
from loong.scheduler.esp.policy import ABLATIONS, plan_esp
from loong.scheduler.infinite.debts import borrow_when_full
from loong.scheduler.infinite.paper import algorithm_1
from loong.scheduler.infinite.policy import plan_infinite
from loong.scheduler.lamina.memory import by_request
from loong.scheduler.lamina.policy import plan_lamina
from loong.scheduler.paper.batching_program import warm_up
from loong.scheduler.paper.policy import plan_esp_paper

Policy: TypeAlias = Callable[[Snapshot, CostModel], IterationPlan]
Plan: TypeAlias = Callable[[Snapshot, CostModel, PolicyConfig], IterationPlan]
Pools: TypeAlias = Mapping[InstanceId, int]
"""The slots of each full instance."""


def _one_part(instance_ids: tuple[InstanceId, ...]) -> Parts:
    return (instance_ids,)


def _part_each(instance_ids: tuple[InstanceId, ...]) -> Parts:
    return tuple((instance_id,) for instance_id in instance_ids)


def _all_pools(pools: Pools) -> int:
    return sum(pools.values())


def _largest_pool(pools: Pools) -> int:
    return max(pools.values())


def _largest_group(pools: Pools, *, size: int) -> int:
    return max(sum(pools[i] for i in part) for part in groups_of(tuple(sorted(pools)), size))


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy's plan function, its KV limit of one request, and its number of instances (None: any).

    The number is a multiple of `group_size`, and above `num_decode`, the instances that only decode. The KV
    of a request is to be within one of the `parts` of some instances, which are ascending. `prepare` is
    called before the first plan. With `needs_service`, each instance must serve all others. With
    `reads_prefixes`, plans say what requests read of the KV of others. With `uses_memory`, it keeps KV on
    memory instances; with `is_bound_by_memory`, a request can have as much as these hold, if there are any.
    Captured steps cannot run leases of one that `rotates`.
    """

    plan: Plan
    max_request_tokens: Callable[[Pools], int] = _all_pools
    max_instances: int | None = None
    num_decode: int = 0
    group_size: int = 1
    parts: Callable[[tuple[InstanceId, ...]], Parts] = _one_part
    prepare: Callable[[], None] = lambda: None
    needs_service: bool = False
    reads_prefixes: bool = True
    uses_memory: bool = False
    is_bound_by_memory: bool = False
    rotates: bool = False

    def limit_of(self, pools: Pools, memory: Pools) -> int:
        """Return the most KV of one request, by the slots of full instances and of memory instances."""
        if not (self.uses_memory and memory):
            return self.max_request_tokens(pools)
        return sum(memory.values()) + (0 if self.is_bound_by_memory else self.max_request_tokens(pools))


def _lending(plan: Plan) -> PolicyKind:
    return PolicyKind(plan, needs_service=True, reads_prefixes=False)


def _offloading(plan: Plan) -> PolicyKind:
    return PolicyKind(
        plan,
        _largest_pool,
        parts=_part_each,
        uses_memory=True,
        is_bound_by_memory=True,
    )


_whole = partial(plan_fixed_groups, filling=WHOLE_PROMPTS)
_chunked = partial(plan_fixed_groups, filling=SPLIT_FUSE)

POLICIES: dict[str, PolicyKind] = {
    "esp": PolicyKind(plan_esp, uses_memory=True),
    "static-sp": PolicyKind(partial(_whole, partition=one_group)),
    "replicas": PolicyKind(partial(_whole, partition=one_per_instance), _largest_pool, parts=_part_each),
    "tp": PolicyKind(partial(_whole, partition=one_group), max_instances=1),
    "chunked": PolicyKind(partial(_chunked, partition=one_group), max_instances=1),
    "chunked-replicas": PolicyKind(
        partial(_chunked, partition=one_per_instance), _largest_pool, parts=_part_each
    ),
    "lightllm": PolicyKind(
        partial(plan_fixed_groups, filling=LIGHTLLM, partition=one_group), max_instances=1
    ),
    "esp-paper": PolicyKind(plan_esp_paper, prepare=warm_up, reads_prefixes=False),
    "infinite": _lending(plan_infinite),
    "infinite-paper": _lending(partial(plan_infinite, rule=algorithm_1, is_paced=True)),
    "distkv": _lending(partial(plan_infinite, rule=borrow_when_full)),
    "lamina": _offloading(plan_lamina),
    "lamina-by-request": _offloading(partial(plan_lamina, balance=by_request)),
    "lamina-rotational": replace(_offloading(partial(plan_lamina, rotates=True)), rotates=True),
    "vllm-m": PolicyKind(
        partial(_whole, partition=one_per_instance, load=memory_in_use), _largest_pool, parts=_part_each
    ),
    "vllm-s": PolicyKind(partial(_whole, partition=one_group), max_instances=1),
    **{
        name: PolicyKind(partial(plan_esp, variant=variant), uses_memory=True)
        for name, variant in ABLATIONS.items()
    },
}


def _fixed(size: int) -> PolicyKind:
    return PolicyKind(
        partial(plan_esp_fixed, size=size),
        partial(_largest_group, size=size),
        group_size=size,
        parts=partial(groups_of, size=size),
    )


def _disaggregated(num_decode: int) -> PolicyKind:
    return PolicyKind(
        partial(plan_disaggregated, num_decode=num_decode),
        partial(max_tokens_moved, num_decode=num_decode),
        num_decode=num_decode,
        parts=_part_each,
        reads_prefixes=False,
    )


def _esp_disaggregated(num_decode: int) -> PolicyKind:
    return PolicyKind(
        partial(plan_esp_disaggregated, num_decode=num_decode),
        partial(max_tokens_of_parts, num_decode=num_decode),
        num_decode=num_decode,
        parts=partial(parts_by_role, num_decode=num_decode),
    )


_NUMBERED: dict[str, tuple[Callable[[int], PolicyKind], str]] = {
    "esp-fixed-": (_fixed, "that divides --num-instances"),
    "esp-disaggregated-": (_esp_disaggregated, "that only decode, less than --num-instances"),
    "disaggregated-": (_disaggregated, "that only decode, less than --num-instances"),
}
NAMES = (*POLICIES, *(f"{start}N" for start in _NUMBERED))
"""All names, for help and errors; N is any whole number above 0."""


@cache
def policy_kind(name: str) -> PolicyKind:
    """Return the policy called `name`, one of `NAMES`.

    Raises:
        ConfigError: there is none.
    """
    if name in POLICIES:
        return POLICIES[name]
    found = fullmatch("(.*-)([1-9][0-9]{0,5})", name)
    if found is None or found[1] not in _NUMBERED:
        raise ConfigError(f"policy {name!r} is none of {', '.join(NAMES)}{_meant(name)}")
    make, _ = _NUMBERED[found[1]]
    return make(int(found[2]))


def fair_baselines(num_instances: int) -> tuple[str, ...]:
    """Return the policies that have everything of `esp` but elastic groups, for that many instances.

    One group of all; and groups for prompts, with 1, 2, 4, ... up to half of the instances for decodes. One
    instance has none, since nothing is elastic there.
    """
    if num_instances == 1:
        return ()
    splits = takewhile(lambda num: 2 * num <= num_instances, (1 << n for n in count()))
    return (f"esp-fixed-{num_instances}", *(f"esp-disaggregated-{num}" for num in splits))


def _meant(name: str) -> str:
    """Return a question about the most similar name, and what N is if that has one."""
    question = meant(name, NAMES)
    numbers = (
        f" N is a number of instances {what}"
        for start, (_, what) in _NUMBERED.items()
        if f" {start}N" in question
    )
    return question + next(numbers, "")


def make_policy(name: str, config: PolicyConfig) -> Policy:
    """Return the policy called `name`. Raises `ConfigError` if there is none.

    After a loss, it first fails requests that the remaining instances can never finish, and those at which
    too many were lost; it isolates those that may be next. KV in too many pieces is dropped, and so is that
    of a request that waits for a loan, if others need the slots. It does not
    preempt a request on instances whose batch is ending, but waits for the KV that the batch frees. It
    empties draining instances, and plans as if these were not there, nor prompts whose KV comes from host
    memory.
    """
    kind = policy_kind(name)
    kind.prepare()

    def plan_of(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        plan = kind.plan(as_admitted(snapshot, config), cost_model, config)
        return plan if config.admission is AdmissionRule.STRICT else relieving(plan, snapshot)

    def policy_of_others(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        if not snapshot.pools:
            return IterationPlan()
        plan = plan_of(without_oversized(snapshot, kind.limit_of, config.max_loan or 0), cost_model)
        if snapshot.ending and plan.preemptions:
            plan = _sparing(plan, snapshot)
        return extending(plan, snapshot, config.lease_steps)

    def policy(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        if (first := fail_stranded(snapshot, kind.limit_of, config.max_loan or 0)) is not None:
            return first
        if (first := drop_fragments(snapshot)) is not None:
            return first
        if config.max_loan and (first := preempt_oversized(snapshot, kind.limit_of)) is not None:
            return first
        if (tier := HostTier.of(snapshot, cost_model)) is None:
            return policy_of_staying(snapshot, cost_model)
        return tier.added_to(policy_of_staying(tier.hiding(), cost_model))

    def policy_of_staying(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        has_readers = kind.uses_memory and not kind.is_bound_by_memory
        if has_readers and (leaving := LeavingMemory.of(snapshot)) is not None:
            plan = isolating(policy_of_others(leaving.shown, cost_model), snapshot)
            return leaving.added_to(plan, cost_model)
        if (draining := Draining.of(snapshot)) is None:
            return isolating(policy_of_others(snapshot, cost_model), snapshot)
        memory_ids = tuple(snapshot.memory_free)
        parts = kind.parts(tuple(sorted(snapshot.pools)))
        emptying = draining.plan(tuple((*part, *memory_ids) for part in parts))
        plan = isolating(policy_of_others(draining.hidden(emptying), cost_model), snapshot)
        return _after_emptying(emptying, plan)

    return policy


def _after_emptying(emptying: IterationPlan, plan: IterationPlan) -> IterationPlan:
    """Return a plan with what empties draining instances before it."""
    return replace(
        plan,
        migrations=emptying.migrations + plan.migrations,
        evictions=emptying.evictions + plan.evictions,
        lease_ends=first_ends(emptying.lease_ends + plan.lease_ends),
        decisions=emptying.decisions + plan.decisions,
    )


def _sparing(plan: IterationPlan, snapshot: Snapshot) -> IterationPlan:
    """Return the plan without preemptions on instances whose batch is ending.

    Parts of the plan that need the preempted room are removed as well.
    """
    ending_on = snapshot.predicted_ends.keys()
    victims = [snapshot.request[preemption.request_id] for preemption in plan.preemptions]
    spared = [view for view in victims if not ending_on.isdisjoint(view.placement.instance_ids)]
    spared_ids = {view.request_id for view in spared}
    roomless = {instance_id for view in spared for instance_id in view.placement.instance_ids}
    return replace(
        plan,
        preemptions=tuple(p for p in plan.preemptions if p.request_id not in spared_ids),
        batches=tuple(b for b in plan.batches if roomless.isdisjoint(b.group.instance_ids)),
        decisions=tuple(d for d in plan.decisions if d.kind is not DecisionKind.PREEMPT or not spared),
    )


def admissible_tokens(name: str, instances: tuple[ElasticInstance, ...]) -> int:
    """Return the most KV, in tokens, that one request may need; its last output token needs none.

    Raises `ConfigError` if the policy cannot run these instances at all.
    """
    check_instances(name, instances)
    return policy_kind(name).limit_of(_pools_of(instances), _pools_of(instances, InstanceKind.ATTENTION))


def check_instances(name: str, instances: tuple[ElasticInstance, ...]) -> None:
    """Raise `ConfigError` if a policy cannot run these instances."""
    kind, pools = policy_kind(name), _pools_of(instances)
    if _pools_of(instances, InstanceKind.ATTENTION) and not kind.uses_memory:
        users = ", ".join(name for name, other in POLICIES.items() if other.uses_memory)
        raise ConfigError(f"policy {name} keeps no KV on --memory-instances; give --policy {users}")
    if kind.max_instances is not None and len(pools) > kind.max_instances:
        raise ConfigError(
            f"policy {name} runs {kind.max_instances} instance, but there are {len(pools)}; "
            "give --num-instances 1, and --tensor-parallel-size for its processes"
        )
    if kind.needs_service and not serve_each_other(instances):
        raise ConfigError(
            f"policy {name} needs instances that attend for batches of others; these do not, or not for all"
        )
    if len(pools) <= kind.num_decode:
        raise ConfigError(
            f"policy {name} runs at least {kind.num_decode + 1} instances, {kind.num_decode} of them for "
            f"decodes, but there are {len(pools)}; give --num-instances"
        )
    if len(pools) % kind.group_size:
        raise ConfigError(
            f"policy {name} runs groups of {kind.group_size} instances, but the number of instances is "
            f"{len(pools)}, which {kind.group_size} does not divide"
        )


def serve_each_other(instances: Sequence[ElasticInstance]) -> bool:
    """Return whether each full instance can serve batches of all others."""
    full = [i for i in instances if i.kind is InstanceKind.FULL]
    return all(holder.can_serve(member) for holder in full for member in full if member is not holder)


def _pools_of(instances: tuple[ElasticInstance, ...], kind: InstanceKind = InstanceKind.FULL) -> Pools:
    return {i.instance_id: i.kv_capacity for i in instances if i.kind is kind}
