"""Names of policies, and flags for what an operator may choose about planning: the same everywhere."""

import argparse
from collections.abc import Callable

from loong.core.errors import ConfigError
from loong.launcher.flags import part, positive, ratio, seconds
from loong.scheduler.config import Fairness, PolicyConfig
from loong.scheduler.policy import NAMES, PolicyKind, policy_kind

_FLAGS: tuple[tuple[str, Callable[[str], int | float], str, str], ...] = (
    ("max_num_batched_tokens", positive, "N", "of a prefill step, an instance"),
    ("max_step_time", seconds, "S", "that a prefill step is meant to take"),
    ("chunk_tokens", positive, "N", "of a step of the chunked policies, an instance"),
    ("lease_steps", positive, "N", "decode steps that a group takes by itself"),
    ("target_ttft", seconds, "S", "of requests without an SLO"),
    ("target_tpot", seconds, "S", "likewise"),
    ("ttft_factor", ratio, "X", "of long ones among them: times the quickest prefill"),
    ("deferred_share", part, "X", "of the time, for the oldest prompt that was deferred"),
    ("decode_instances", positive, "N", "last instances, which only decode (disaggregated policies)"),
)


class PolicyNames(tuple[str, ...]):
    """Names of policies as choices of a flag. All names that `esp-fixed-N` stands for are among them."""

    __slots__ = ()

    def __contains__(self, name: object) -> bool:
        try:
            policy_kind(str(name))
        except ConfigError:
            return False
        return True


POLICY_NAMES = PolicyNames(NAMES)


def named_kind(policy: str) -> PolicyKind:
    """Return the policy that `--policy` names.

    Raises:
        ConfigError: there is none. Lists those that exist.
    """
    if policy not in POLICY_NAMES:
        raise ConfigError(f"--policy {policy!r} is unknown; choose from {', '.join(POLICY_NAMES)}")
    return policy_kind(policy)


def add_policy_flags(group: argparse._ArgumentGroup) -> None:
    """A flag for each field of `PolicyConfig`."""
    defaults = PolicyConfig()
    for name, parse, unit, text in _FLAGS:
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=parse,
            default=getattr(defaults, name),
            metavar=unit,
            help=f"{text} ({'half' if name == 'decode_instances' else '%(default)s'})",
        )
    group.add_argument(
        "--fairness",
        choices=tuple(kind.value for kind in Fairness),
        default=defaults.fairness.value,
        help="between whom to share when not all can be in time (%(default)s)",
    )


def policy_config(args: argparse.Namespace) -> PolicyConfig:
    """What the flags say."""
    numbers = {name: getattr(args, name) for name, *_ in _FLAGS}
    return PolicyConfig(fairness=Fairness(args.fairness), **numbers)
