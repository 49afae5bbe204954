"""Every policy that laws are tried with: those with names, and some sizes of groups."""

from loong.scheduler.policy import POLICIES, policy_kind

POLICY_NAMES = sorted((*POLICIES, "esp-fixed-1", "esp-fixed-2"))


def num_instances_of(name: str, most: int) -> int:
    """Return the largest number of instances, at most `most`, that a policy runs."""
    kind = policy_kind(name)
    num_instances = min(most, kind.max_instances or most)
    return num_instances - num_instances % kind.group_size
