"""Policies by name."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from loong.core.cost_model import CostModel
from loong.core.errors import ConfigError
from loong.core.instance import ElasticInstance
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.scheduler.cell import full_instances
from loong.scheduler.config import PolicyConfig
from loong.scheduler.esp import plan_esp
from loong.scheduler.fixed_groups import each_alone, one_group, plan_fixed_groups

Policy: TypeAlias = Callable[[Snapshot, CostModel], IterationPlan]


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """How a policy plans; over how many instances it spreads a request, and how many it runs (None: all)."""

    plan: Callable[[Snapshot, CostModel, PolicyConfig], IterationPlan]
    max_request_dop: int | None = None
    max_instances: int | None = None


_plan_static_sp = partial(plan_fixed_groups, partition=one_group)
_plan_replicas = partial(plan_fixed_groups, partition=each_alone)

POLICIES: dict[str, PolicyKind] = {
    "esp": PolicyKind(plan_esp),
    "static-sp": PolicyKind(_plan_static_sp),
    "replicas": PolicyKind(_plan_replicas, max_request_dop=1),
    "tp": PolicyKind(_plan_static_sp, max_instances=1),
}


def make_policy(name: str, config: PolicyConfig) -> Policy:
    """The policy called `name`. Raises `ConfigError` if there is none."""
    plan = _kind(name).plan
    return lambda snapshot, cost_model: plan(snapshot, cost_model, config)


def admissible_tokens(name: str, instances: tuple[ElasticInstance, ...]) -> int:
    """The most KV, in tokens, that one request may come to need; its last output token needs none.

    Raises `ConfigError` if the policy cannot run these instances at all.
    """
    kind, full = _kind(name), full_instances(instances)
    if kind.max_instances is not None and len(full) > kind.max_instances:
        raise ConfigError(
            f"policy {name} runs {kind.max_instances} instance, but there are {len(full)}; "
            "give --num-instances 1, and --tensor-parallel-size for its processes"
        )
    pools = sorted((instance.kv_capacity for instance in full), reverse=True)
    return sum(pools[: kind.max_request_dop])


def _kind(name: str) -> PolicyKind:
    if name not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(sorted(POLICIES))}, but is {name!r}")
    return POLICIES[name]
