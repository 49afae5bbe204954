"""Policies by name."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, count, takewhile
from re import fullmatch
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import InstanceId
from loong.core.plan import Failure, FailureCause, IterationPlan
from loong.core.request import RequestView
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
from loong.scheduler.common.borrowed_kv import borrowed_at
from loong.scheduler.common.cluster_parts import Parts, groups_of
from loong.scheduler.common.draining import Draining
from loong.scheduler.common.expected_lengths import expecting, relieving
from loong.scheduler.common.fragments import drop_fragments
from loong.scheduler.common.host_tier import HostTier
from loong.scheduler.common.lease_extensions import extending
from loong.scheduler.common.leases import first_ends
from loong.scheduler.common.suspects import guilty, isolating
from loong.scheduler.config import AdmissionRule, PolicyConfig
from loong.scheduler.esp.policy import ABLATIONS, plan_esp
from loong.scheduler.infinite.policy import plan_infinite
from loong.scheduler.paper.batching_program import warm_up
from loong.scheduler.paper.policy import plan_esp_paper

Policy: TypeAlias = Callable[[Snapshot, CostModel], IterationPlan]
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
    `reads_prefixes`, plans say what requests read of the KV of others.
    """

    plan: Callable[[Snapshot, CostModel, PolicyConfig], IterationPlan]
    max_request_tokens: Callable[[Pools], int] = _all_pools
    max_instances: int | None = None
    num_decode: int = 0
    group_size: int = 1
    parts: Callable[[tuple[InstanceId, ...]], Parts] = _one_part
    prepare: Callable[[], None] = lambda: None
    needs_service: bool = False
    reads_prefixes: bool = True


_whole = partial(plan_fixed_groups, filling=WHOLE_PROMPTS)
_chunked = partial(plan_fixed_groups, filling=SPLIT_FUSE)

POLICIES: dict[str, PolicyKind] = {
    "esp": PolicyKind(plan_esp),
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
    "infinite": PolicyKind(plan_infinite, needs_service=True, reads_prefixes=False),
    "vllm-m": PolicyKind(
        partial(_whole, partition=one_per_instance, load=memory_in_use), _largest_pool, parts=_part_each
    ),
    "vllm-s": PolicyKind(partial(_whole, partition=one_group), max_instances=1),
    **{name: PolicyKind(partial(plan_esp, variant=variant)) for name, variant in ABLATIONS.items()},
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
    too many were lost; it isolates those that may be next. KV in too many pieces is dropped. It does not
    preempt a request on instances whose batch is ending, but waits for the KV that the batch frees. It
    empties draining instances, and plans as if these were not there, nor prompts whose KV comes from host
    memory.
    """
    kind = policy_kind(name)
    kind.prepare()

    def plan_of(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        if config.admission is AdmissionRule.STRICT:
            return kind.plan(snapshot, cost_model, config)
        expected = expecting(snapshot, config.lease_steps)
        return relieving(kind.plan(expected, cost_model, config), snapshot)

    def policy_of_others(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        if not snapshot.pools:
            return IterationPlan()
        plan = plan_of(without_oversized(snapshot, kind), cost_model)
        if snapshot.ending and plan.preemptions:
            plan = _sparing(plan, snapshot)
        return extending(plan, snapshot, config.lease_steps)

    def policy(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        if (first := fail_stranded(snapshot, kind) or drop_fragments(snapshot)) is not None:
            return first
        if (tier := HostTier.of(snapshot, cost_model)) is None:
            return policy_of_staying(snapshot, cost_model)
        return tier.added_to(policy_of_staying(tier.hiding(), cost_model))

    def policy_of_staying(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        if (draining := Draining.of(snapshot)) is None:
            return isolating(policy_of_others(snapshot, cost_model), snapshot)
        emptying = draining.plan(kind.parts(tuple(sorted(snapshot.pools))))
        plan = isolating(policy_of_others(draining.hidden(emptying), cost_model), snapshot)
        return replace(
            plan,
            migrations=emptying.migrations + plan.migrations,
            evictions=emptying.evictions + plan.evictions,
            lease_ends=first_ends(emptying.lease_ends + plan.lease_ends),
            decisions=emptying.decisions + plan.decisions,
        )

    return policy


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


def fail_stranded(snapshot: Snapshot, kind: PolicyKind) -> IterationPlan | None:
    """Return failures of the requests not in flight that can never go on, or None.

    They need more KV than one can have now, or too many instances were lost at them. While no instance is
    left, they wait for one, as all others do.
    """
    pools = {**snapshot.pools, **snapshot.returning}
    if not pools:
        return None
    limit = kind.max_request_tokens(pools)
    left = f"{len(pools)} instances that are left" if len(pools) > 1 else "instance that is left"
    failures = [*guilty(_resting(snapshot))] if snapshot.stats.num_losses else []
    if snapshot.most_tokens > limit:
        guilty_ids = {failure.request_id for failure in failures}
        failures += [
            Failure(
                view.request_id,
                f"it needs KV for {view.num_final_tokens} tokens, but can have that of {limit} on the {left}",
                FailureCause.NO_ROOM,
            )
            for view in _resting(snapshot)
            if view.num_final_tokens > limit and view.request_id not in guilty_ids
        ]
    if not failures:
        return None
    return IterationPlan(
        failures=tuple(failures),
        decisions=tuple(Decision(DecisionKind.FAIL, (f.request_id,), f.reason) for f in failures),
    )


def without_oversized(snapshot: Snapshot, kind: PolicyKind) -> Snapshot:
    """Hide the requests not in flight that need an instance that is being started again, and their slots."""
    if not snapshot.returning or not snapshot.pools:
        return snapshot
    limit = kind.max_request_tokens(snapshot.pools)
    hidden = {v.request_id: v for v in _resting(snapshot) if v.num_final_tokens > limit}
    held: Counter[InstanceId] = Counter()
    for view in hidden.values():
        held.update(view.own_tokens_by_instance())
    for (_, instance_id), num_tokens in dict(chain.from_iterable(map(borrowed_at, hidden.values()))).items():
        held[instance_id] += num_tokens
    return replace(
        snapshot,
        instances=tuple(
            replace(
                i, kv_capacity=i.kv_capacity - held[i.instance_id], kv_used=i.kv_used - held[i.instance_id]
            )
            for i in snapshot.instances
        ),
        waiting=tuple(view for view in snapshot.waiting if view.request_id not in hidden),
        running=tuple(view for view in snapshot.running if view.request_id not in hidden),
    )


def _resting(snapshot: Snapshot) -> Iterator[RequestView]:
    return (view for view in (*snapshot.waiting, *snapshot.running) if view.is_plannable)


def admissible_tokens(name: str, instances: tuple[ElasticInstance, ...]) -> int:
    """Return the most KV, in tokens, that one request may need; its last output token needs none.

    Raises `ConfigError` if the policy cannot run these instances at all.
    """
    check_instances(name, instances)
    return policy_kind(name).max_request_tokens(_pools_of(instances))


def check_instances(name: str, instances: tuple[ElasticInstance, ...]) -> None:
    """Raise `ConfigError` if a policy cannot run these instances."""
    kind, pools = policy_kind(name), _pools_of(instances)
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


def _pools_of(instances: tuple[ElasticInstance, ...]) -> Pools:
    return {i.instance_id: i.kv_capacity for i in instances if i.kind is InstanceKind.FULL}
