"""Why a plan is as it is: what a policy chose, and what it passed over. Nothing acts on it."""

from dataclasses import dataclass
from enum import Enum

from loong.core.request import RequestId
from loong.core.value import value


class DecisionKind(Enum):
    """What was decided. That a request waits or is deferred is said in every plan, all else once."""

    WAIT = "wait"  # that requests do not run now
    DEFER = "defer"  # that they run after others
    DOP = "dop"  # how many instances they run on
    MIGRATE = "migrate"  # which KV not in flight moves
    PREEMPT = "preempt"  # whose KV is dropped
    END_LEASE = "end_lease"  # which lease ends early
    FAIL = "fail"  # who can never go on


@dataclass(frozen=True, slots=True)
class Alternative:
    """One thing that could have been done; `cost` is predicted seconds, infinite for what is impossible."""

    what: str
    cost: float


@value
class Decision:
    """What was chosen for these requests, among which alternatives."""

    kind: DecisionKind
    request_ids: tuple[RequestId, ...]
    chosen: str
    alternatives: tuple[Alternative, ...] = ()
