"""Names of policies, and flags for planning, which are the same in every command."""

import argparse

from loong.core.errors import ConfigError
from loong.launcher.config_flags import FieldFlag, add_field_flags, field_values
from loong.launcher.flags import part, positive, ratio, seconds, target
from loong.scheduler.config import USUAL_STEP_TIME, AdmissionRule, Fairness, PolicyConfig
from loong.scheduler.policy import NAMES, fair_baselines, policy_kind
from loong.scheduler.tuning import MAX_STEP_SHARE

_STEP_TIMES = (
    f"esp: {MAX_STEP_SHARE} of the least TTFT target, more if steps are slow; others: {USUAL_STEP_TIME}"
)
_NONE = "none: for throughput alone"
_FLAGS = (
    FieldFlag("max_num_batched_tokens", positive, "N", "bound on prompt tokens of a step on each instance"),
    FieldFlag("max_step_time", seconds, "S", "target time of a step without decodes", _STEP_TIMES),
    FieldFlag("chunk_tokens", positive, "N", "token budget of a step on each instance, for chunked policies"),
    FieldFlag("router_token_ratio", part, "X", "share of the pool up to which `lightllm` over-commits it"),
    FieldFlag("lease_steps", positive, "N", "decode steps that a group takes without a new plan"),
    FieldFlag(
        "max_micro_batches",
        positive,
        "N",
        "parts of a lease at most, of which one computes while others are attended on memory instances",
        "2 on processors, 1 on GPUs",
    ),
    FieldFlag("target_ttft", target, "S", f"TTFT target of a request without an SLO; {_NONE}"),
    FieldFlag("target_tpot", target, "S", f"TPOT target of a request without an SLO; {_NONE}"),
    FieldFlag(
        "ttft_factor", ratio, "X", "TTFT target of a long prompt, as a multiple of its fastest prefill"
    ),
    FieldFlag(
        "deferred_share", part, "X", "guaranteed share of computing time for the oldest deferred prompt"
    ),
)


class PolicyNames(tuple[str, ...]):
    """The names of policies as choices of a flag, with every name that has a number."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        try:
            policy_kind(str(name))
        except ConfigError:
            return False
        return True


POLICY_NAMES = PolicyNames(NAMES)


def policy_name(text: str) -> str:
    """Parse the name of a policy."""
    try:
        policy_kind(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def policy_names(text: str) -> tuple[str, ...]:
    """Parse names of policies with commas, each given once."""
    names = text.split(",")
    if "" in names:
        raise argparse.ArgumentTypeError("it needs one name or several with commas, such as esp,static-sp")
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text} names a policy twice")
    return tuple(map(policy_name, names))


def add_policy_flags(group: argparse._ArgumentGroup) -> None:
    """Add a flag for each field of `PolicyConfig`."""
    add_field_flags(group, PolicyConfig, _FLAGS)
    group.add_argument(
        "--fairness",
        choices=tuple(kind.value for kind in Fairness),
        default=PolicyConfig().fairness.value,
        help="who gets equal shares of the cluster when not all can be in time (%(default)s)",
    )
    group.add_argument(
        "--admission",
        choices=tuple(rule.value for rule in AdmissionRule),
        default=PolicyConfig().admission.value,
        help="output length for which a request needs room before it begins; strict: its max_tokens; "
        "expected: what most outputs of similar max_tokens did not exceed (%(default)s)",
    )


def compared_policies(num_instances: int) -> tuple[str, ...]:
    """Return the policies that are compared where none is named: the default, and its fair baselines."""
    return ("esp", *fair_baselines(num_instances))


COMPARED_WORDS = "esp, esp-fixed-N of all, and esp-disaggregated-N of 1, 2, 4, ... up to half"


def policy_config(args: argparse.Namespace) -> PolicyConfig:
    """Return the policy's configuration that the flags give."""
    return PolicyConfig(
        fairness=Fairness(args.fairness),
        admission=AdmissionRule(args.admission),
        **field_values(args, _FLAGS),
    )
