"""Policies by name."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from re import fullmatch
from typing import TypeAlias

from loong.core.cost.cost_model import CostModel
from loong.core.decision import Decision, DecisionKind
from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance, InstanceKind, Service
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
from loong.scheduler.baselines.fixed_policy import SPLIT_FUSE, WHOLE_PROMPTS, plan_fixed_groups
from loong.scheduler.common.cluster_parts import Parts, groups_of
from loong.scheduler.common.draining import Draining
from loong.scheduler.common.fragments import drop_fragments
from loong.scheduler.common.lease_extensions import extending
from loong.scheduler.common.leases import first_ends
from loong.scheduler.common.suspects import guilty, isolating
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp.policy import ABLATIONS, plan_esp
from loong.scheduler.infinite.policy import plan_infinite
from loong.scheduler.paper.batching_program import warm_up
from loong.scheduler.paper.policy import plan_esp_paper

DEFAULT_CONFIG = PolicyConfig()
Policy: TypeAlias = Callable[[Snapshot, CostModel], IterationPlan]
Pools: TypeAlias = Mapping[InstanceId, int]
"""The slots of each full instance."""


def _one_part(instance_ids: tuple[InstanceId, ...], _config: PolicyConfig) -> Parts:
    return (instance_ids,)


def _part_each(instance_ids: tuple[InstanceId, ...], _config: PolicyConfig) -> Parts:
    return tuple((instance_id,) for instance_id in instance_ids)


def _all_pools(pools: Pools, _config: PolicyConfig) -> int:
    return sum(pools.values())


def _largest_pool(pools: Pools, _config: PolicyConfig) -> int:
    return max(pools.values())


def _largest_group(pools: Pools, _config: PolicyConfig, *, size: int) -> int:
    return max(sum(pools[i] for i in part) for part in groups_of(tuple(sorted(pools)), size))


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy's plan function, its KV limit of one request, and its number of instances (None: any).

    The number is a multiple of `group_size`. The KV of a request is to be within one of the `parts` of some
    instances, which are ascending. `prepare` is called before the first plan. `services` are those of which
    each instance must have one.
    """

    plan: Callable[[Snapshot, CostModel, PolicyConfig], IterationPlan]
    max_request_tokens: Callable[[Pools, PolicyConfig], int] = _all_pools
    max_instances: int | None = None
    min_instances: int = 1
    group_size: int = 1
    parts: Callable[[tuple[InstanceId, ...], PolicyConfig], Parts] = _one_part
    prepare: Callable[[], None] = lambda: None
    services: Collection[Service] = tuple(Service)


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
    "esp-paper": PolicyKind(plan_esp_paper, prepare=warm_up),
    "disaggregated": PolicyKind(plan_disaggregated, max_tokens_moved, min_instances=2, parts=_part_each),
    "esp-disaggregated": PolicyKind(
        plan_esp_disaggregated, max_tokens_of_parts, min_instances=2, parts=parts_by_role
    ),
    "infinite": PolicyKind(plan_infinite, services=(Service.ALL,)),
    "vllm-m": PolicyKind(
        partial(_whole, partition=one_per_instance, load=memory_in_use), _largest_pool, parts=_part_each
    ),
    "vllm-s": PolicyKind(partial(_whole, partition=one_group), max_instances=1),
    **{name: PolicyKind(partial(plan_esp, variant=variant)) for name, variant in ABLATIONS.items()},
}


FIXED = "esp-fixed-"
NAMES = (*POLICIES, f"{FIXED}N")
"""All names, for help and errors; N is any whole number above 0."""


def policy_kind(name: str) -> PolicyKind:
    """Return the policy called `name`, one of `POLICIES` or `esp-fixed-N`.

    Raises:
        ConfigError: there is none.
    """
    if name in POLICIES:
        return POLICIES[name]
    if (found := fullmatch(f"{FIXED}([1-9][0-9]{{0,5}})", name)) is None:
        raise ConfigError(f"policy {name!r} is none of {', '.join(NAMES)}{_meant(name)}")
    return _fixed_kind(int(found[1]))


def _meant(name: str) -> str:
    """Return a question about the most similar name, and what N is if that has one."""
    question = meant(name, NAMES)
    is_fixed = FIXED in question
    return f"{question} N is a number of instances that divides --num-instances" if is_fixed else question


@cache
def _fixed_kind(size: int) -> PolicyKind:
    return PolicyKind(
        partial(plan_esp_fixed, size=size),
        partial(_largest_group, size=size),
        group_size=size,
        parts=lambda instance_ids, _config: groups_of(instance_ids, size),
    )


def make_policy(name: str, config: PolicyConfig) -> Policy:
    """Return the policy called `name`. Raises `ConfigError` if there is none.

    After a loss, it first fails requests that the remaining instances can never finish, and those at which
    too many were lost; it isolates those that may be next. KV in too many pieces is dropped. It does not
    preempt a request on instances whose batch is ending, but waits for the KV that the batch frees. It
    empties draining instances, and plans as if these were not there.
    """
    kind = policy_kind(name)
    kind.prepare()

    def policy_of_others(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        if not snapshot.pools:
            return IterationPlan()
        plan = kind.plan(without_oversized(snapshot, kind, config), cost_model, config)
        if snapshot.ending and plan.preemptions:
            plan = _sparing(plan, snapshot)
        return extending(plan, snapshot, config.lease_steps)

    def policy(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        if (first := fail_stranded(snapshot, kind, config) or drop_fragments(snapshot)) is not None:
            return first
        if (draining := Draining.of(snapshot)) is None:
            return isolating(policy_of_others(snapshot, cost_model), snapshot)
        emptying = draining.plan(kind.parts(tuple(sorted(snapshot.pools)), config))
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


def fail_stranded(snapshot: Snapshot, kind: PolicyKind, config: PolicyConfig) -> IterationPlan | None:
    """Return failures of the requests not in flight that can never go on, or None.

    They need more KV than one can have now, or too many instances were lost at them. While no instance is
    left, they wait for one, as all others do.
    """
    pools = {**snapshot.pools, **snapshot.returning}
    if not pools:
        return None
    limit = kind.max_request_tokens(pools, config)
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


def without_oversized(snapshot: Snapshot, kind: PolicyKind, config: PolicyConfig) -> Snapshot:
    """Hide the requests not in flight that need an instance that is being started again, and their slots."""
    if not snapshot.returning or not snapshot.pools:
        return snapshot
    limit = kind.max_request_tokens(snapshot.pools, config)
    hidden = {v.request_id: v for v in _resting(snapshot) if v.num_final_tokens > limit}
    held: Counter[InstanceId] = Counter()
    for view in hidden.values():
        held.update(view.own_tokens_by_instance())
    for shared in {view.primary_id: view.shared for view in hidden.values()}.values():
        held.update(shared.tokens_by_instance())
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


def admissible_tokens(
    name: str, instances: tuple[ElasticInstance, ...], config: PolicyConfig = DEFAULT_CONFIG
) -> int:
    """Return the most KV, in tokens, that one request may need; its last output token needs none.

    Raises `ConfigError` if the policy cannot run these instances at all.
    """
    check_instances(name, instances, config)
    return policy_kind(name).max_request_tokens(_pools_of(instances), config)


def check_instances(
    name: str, instances: tuple[ElasticInstance, ...], config: PolicyConfig = DEFAULT_CONFIG
) -> None:
    """Raise `ConfigError` if a policy cannot run these instances."""
    kind, pools = policy_kind(name), _pools_of(instances)
    if kind.max_instances is not None and len(pools) > kind.max_instances:
        raise ConfigError(
            f"policy {name} runs {kind.max_instances} instance, but there are {len(pools)}; "
            "give --num-instances 1, and --tensor-parallel-size for its processes"
        )
    if not all(i.serves in kind.services for i in instances if i.kind is InstanceKind.FULL):
        raise ConfigError(
            f"policy {name} needs instances that attend for batches of others; these do not, or not for all"
        )
    if len(pools) < kind.min_instances:
        raise ConfigError(
            f"policy {name} runs at least {kind.min_instances} instances, but there are {len(pools)}; "
            "give --num-instances"
        )
    if len(pools) % kind.group_size:
        raise ConfigError(
            f"policy {name} runs groups of {kind.group_size} instances, but the number of instances is "
            f"{len(pools)}, which {kind.group_size} does not divide"
        )
    if kind.min_instances > 1 and (config.decode_instances or 0) >= len(pools):
        raise ConfigError(
            f"--decode-instances {config.decode_instances} of {len(pools)} instances leaves none for prompts"
        )


def _pools_of(instances: tuple[ElasticInstance, ...]) -> Pools:
    return {i.instance_id: i.kv_capacity for i in instances if i.kind is InstanceKind.FULL}
