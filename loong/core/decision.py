"""The reasons of a plan: choices of a policy, and their alternatives. Nothing acts on them."""

from dataclasses import dataclass
from enum import StrEnum

from loong.core.request import RequestId
from loong.core.value import value


class DecisionKind(StrEnum):
    """The kind of a decision. Waits and deferrals are reported in every plan, all others once."""

    WAIT = "wait"  # requests that do not run now
    DEFER = "defer"  # requests that run after others
    DOP = "dop"  # the number of instances of a group
    MIGRATE = "migrate"  # KV not in flight that moves
    LEND = "lend"  # KV that moves to an instance with room, or back from there
    LOAD = "load"  # KV in a host tier that comes back, or is computed again
    COPY = "copy"  # KV that several requests may read, and that these are to read elsewhere, too
    PREEMPT = "preempt"  # requests whose KV is dropped
    EVICT = "evict"  # KV of some positions that is dropped
    END_LEASE = "end_lease"  # a lease that ends early
    MISS = "miss"  # tokens that a request computes, though the prefix cache might have had them
    FAIL = "fail"  # a request that can never go on


@dataclass(frozen=True, slots=True)
class Alternative:
    """One possible choice; `cost` is predicted seconds, infinite if it is impossible."""

    what: str
    cost: float


@value
class Decision:
    """A choice for these requests, and its alternatives."""

    kind: DecisionKind
    request_ids: tuple[RequestId, ...]
    chosen: str
    alternatives: tuple[Alternative, ...] = ()
