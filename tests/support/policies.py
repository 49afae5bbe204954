"""Every policy that laws are tried with: those with names, and some with numbers."""

from loong.scheduler.policy import POLICIES, policy_kind

NUMBERED = (
    "disaggregated-1",
    "disaggregated-2",
    "esp-disaggregated-1",
    "esp-disaggregated-2",
    "esp-fixed-1",
    "esp-fixed-2",
)

POLICY_NAMES = sorted((*POLICIES, *NUMBERED))


def num_instances_of(name: str, most: int) -> int:
    """Return the number of instances nearest to `most`, and at most that if it can be, that a policy runs."""
    kind = policy_kind(name)
    num_instances = max(kind.num_decode + 1, min(most, kind.max_instances or most))
    return num_instances - num_instances % kind.group_size
