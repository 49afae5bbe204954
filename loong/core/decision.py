"""Why a plan is as it is: what a policy chose, and what it passed over. Nothing acts on it."""

from dataclasses import dataclass
from enum import Enum

from loong.core.request import RequestId


class DecisionKind(Enum):
    """What was decided."""

    WAIT = "wait"  # whether requests start now
    DISPATCH = "dispatch"  # which requests run together
    DOP = "dop"  # how many instances they run on
    CHUNK = "chunk"  # how many of their tokens one step computes
    KEEP = "keep"  # which instances keep the KV made
    MIGRATE = "migrate"  # which KV at rest moves
    PREEMPT = "preempt"  # whose KV is dropped
    END_LEASE = "end_lease"  # which lease ends early


@dataclass(frozen=True, slots=True)
class Alternative:
    """One thing that could have been done; `cost` is predicted seconds, or the policy's objective."""

    what: str
    cost: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen for these requests, among which alternatives."""

    kind: DecisionKind
    request_ids: tuple[RequestId, ...]
    chosen: str
    alternatives: tuple[Alternative, ...] = ()
