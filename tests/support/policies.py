"""Every policy that laws are tried with: those with names, and some with numbers.

Those that lack one part of `esp` come in the thorough profile alone, and in tests of their own.
"""

from hypothesis import settings

from loong.scheduler.esp.policy import ABLATIONS
from loong.scheduler.policy import POLICIES, policy_kind

NUMBERED = (
    "disaggregated-1",
    "disaggregated-2",
    "esp-disaggregated-1",
    "esp-disaggregated-2",
    "esp-fixed-1",
    "esp-fixed-2",
)

LEFT_OUT = () if settings.get_current_profile_name() == "thorough" else tuple(ABLATIONS)
POLICY_NAMES = sorted({*POLICIES, *NUMBERED}.difference(LEFT_OUT))


def num_instances_of(name: str, most: int) -> int:
    """Return the number of instances nearest to `most`, and at most that if it can be, that a policy runs."""
    kind = policy_kind(name)
    num_instances = max(kind.num_decode + 1, min(most, kind.max_instances or most))
    return num_instances - num_instances % kind.group_size
