"""The lines of a decision log.

Times are seconds of the executor's clock, other durations are seconds, sizes are tokens. Batches and
migrations have the executor's ids. A field with its default is left out of a line.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

from loong.core.cost.work import Phase, phase_with
from loong.core.decision import DecisionKind
from loong.core.instance import InstanceKind
from loong.core.plan import PreemptionReason
from loong.core.request import FinishReason

VERSION = 6

EventName: TypeAlias = Literal[
    "request_arrived",
    "request_aborted",
    "batch_started",
    "tokens_produced",
    "lease_ending",
    "batch_end_predicted",
    "batch_finished",
    "migration_finished",
    "instance_lost",
    "instance_joined",
    "instance_draining",
    "instance_left",
    "instance_lent",
    "instance_returned",
    "prefix_cache_reset",
]
TokensByInstance: TypeAlias = dict[int, int]
Number: TypeAlias = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]  # that can be reckoned with


class _Part(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a line."""


class _Line(_Part, frozen=True, tag_field="line"):
    """The base of all lines."""


class InstanceState(_Part, frozen=True):
    """An instance before a plan: used slots in its pool (including reserved ones), and its running batch.

    One that `is_draining` is to leave.
    """

    instance_id: int
    kv_used: int
    kv_capacity: int
    kind: InstanceKind = InstanceKind.FULL
    batch_id: int | None = None
    is_draining: bool = False


class Cause(_Part, frozen=True):
    """An event that caused a plan, and its subject. An abort has a `reason`, as `EndedLine`."""

    event: EventName
    request_id: str | None = None
    batch_id: int | None = None
    migration_id: int | None = None
    instance_id: int | None = None
    reason: FinishReason = FinishReason.ABORT


class Chunk(_Part, frozen=True):
    """Known positions of one request that a batch computes, mostly positions of the prompt.

    `num_repaired` of them come before KV that exists: their KV was evicted, or lost with an instance.
    """

    request_id: str
    first_position: int
    num_tokens: int
    computed_on: TokensByInstance
    kept_on: TokensByInstance
    num_output_tokens: int = 0  # of the request before this chunk
    num_repaired: int = 0

    @property
    def stop_position(self) -> int:
        """The position after the last one."""
        return self.first_position + self.num_tokens


class Decode(_Part, frozen=True):
    """One token in each step of one request, whose KV its master computes and stores."""

    request_id: str
    first_position: int
    master_id: int


class LoggedBatch(_Part, frozen=True):
    """A batch of up to `num_steps` steps. The instances of its group are in ring order.

    Holders are instances outside the group that attend over their KV for the batch. `cached` is the KV, by
    instance, that requests which begin with it read instead of computing it.
    """

    batch_id: int
    instance_ids: tuple[int, ...]
    dop: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    num_steps: int = 1
    predicted_seconds: Number | None = None  # of one step
    holder_ids: tuple[int, ...] = ()
    cached: dict[str, TokensByInstance] = {}

    @property
    def phase(self) -> Phase:
        """The kind of its queries."""
        return phase_with(bool(self.chunks), bool(self.decodes))

    @property
    def num_requests(self) -> int:
        """The number of requests in the batch."""
        return len(self.chunks) + len(self.decodes)


class Migration(_Part, frozen=True):
    """A migration of KV of one request, which may be in a batch that reads it meanwhile.

    For KV that several requests may read, `request_id` is that of its owner; a copy of it `keeps_source`.
    """

    migration_id: int
    request_id: str
    num_tokens: int
    source_id: int
    destination_id: int
    during_batch_id: int | None = None
    keeps_source: bool = False


class Preempted(_Part, frozen=True):
    """A request whose KV, given by instance, is dropped."""

    request_id: str
    kv: TokensByInstance
    reason: PreemptionReason = PreemptionReason.NO_ROOM


class Evicted(_Part, frozen=True):
    """A request of whose KV some, given by instance, is dropped. `num_kept` tokens stay."""

    request_id: str
    kv: TokensByInstance
    num_kept: int = 0


class EndedLease(_Part, frozen=True):
    """A lease that is to end before `step`."""

    batch_id: int
    step: int


class ExtendedLease(_Part, frozen=True):
    """A lease that is extended to `num_steps` steps."""

    batch_id: int
    num_steps: int


class ConsideredAlternative(_Part, frozen=True):
    """An alternative of the policy. A cost of None is infinite: the alternative was impossible."""

    what: str
    cost: Number | None


class Reason(_Part, frozen=True):
    """The policy's choice for some requests, and its alternatives."""

    kind: DecisionKind
    request_ids: tuple[str, ...]
    chosen: str
    alternatives: tuple[ConsideredAlternative, ...] = ()


class StartedLine(_Line, frozen=True, tag="started"):
    """A run of a policy begins. `clock_start` is the Unix time of the clock's 0, or None in virtual time."""

    version: int
    clock_start: Number | None = None
    policy: str | None = None


class ArrivedLine(_Line, frozen=True, tag="arrived"):
    """A request arrived, with the instances before it.

    Its targets are those of its own SLO, or else the policy's; None where it has none. Workers compiled its
    grammar for `grammar_seconds` before it could be planned. Another choice of
    `choice_of` begins when that one has computed the prompt of both.
    """

    time: Number
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    instances: tuple[InstanceState, ...]
    ttft_slo: Number | None = None
    tpot_slo: Number | None = None
    user: str = ""
    choice_of: str | None = None
    grammar_seconds: Number = 0.0


class PlannedLine(_Line, frozen=True, tag="planned"):
    """A plan, its reasons, and the instances that it was made for.

    Empty plans without reasons have no line.
    """

    time: Number
    causes: tuple[Cause, ...]
    instances: tuple[InstanceState, ...]
    batches: tuple[LoggedBatch, ...] = ()
    migrations: tuple[Migration, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    ended_leases: tuple[EndedLease, ...] = ()
    extended_leases: tuple[ExtendedLease, ...] = ()
    reasons: tuple[Reason, ...] = ()
    evicted: tuple[Evicted, ...] = ()


class BatchStartedLine(_Line, frozen=True, tag="batch_started"):
    """All instances of a batch have begun it. It may have been planned during an earlier batch."""

    time: Number
    batch_id: int


class BatchEndedLine(_Line, frozen=True, tag="batch_ended"):
    """A batch has ended, with the mean and the predicted seconds of its steps."""

    time: Number
    batch_id: int
    num_steps: int
    seconds: Number
    predicted_seconds: Number | None = None


class MigrationEndedLine(_Line, frozen=True, tag="migration_ended"):
    """A migration has been committed or rolled back."""

    time: Number
    migration_id: int
    is_committed: bool


class FirstTokenLine(_Line, frozen=True, tag="first_token"):
    """The first output token of a request was reported."""

    time: Number
    request_id: str


class EndedLine(_Line, frozen=True, tag="ended"):
    """A request has ended, with ABORT if its client left."""

    time: Number
    request_id: str
    reason: FinishReason
    num_output_tokens: int


class InstanceLostLine(_Line, frozen=True, tag="instance_lost"):
    """An instance was lost with its KV. Its batches and migrations never end."""

    time: Number
    instance_id: int
    why: str = ""
    void_batch_ids: tuple[int, ...] = ()  # the batches that never end because of it


class InstanceJoinedLine(_Line, frozen=True, tag="instance_joined"):
    """An instance joined, empty."""

    time: Number
    instance_id: int
    kv_capacity: int
    why: str = ""  # if it is room of another engine


class InstanceDrainingLine(_Line, frozen=True, tag="instance_draining"):
    """An instance is to leave: it takes nothing new, and its KV moves or is dropped."""

    time: Number
    instance_id: int
    why: str = ""


class RoomLentLine(_Line, frozen=True, tag="room_lent"):
    """Another engine has got room of an instance."""

    time: Number
    instance_id: int
    num_tokens: int
    why: str = ""


class RoomReturnedLine(_Line, frozen=True, tag="room_returned"):
    """An instance has room again that it had lent."""

    time: Number
    instance_id: int
    why: str = ""


class InstanceLeftLine(_Line, frozen=True, tag="instance_left"):
    """An instance left, or a lost one does not return."""

    time: Number
    instance_id: int


Line: TypeAlias = (
    StartedLine
    | ArrivedLine
    | PlannedLine
    | BatchStartedLine
    | BatchEndedLine
    | MigrationEndedLine
    | FirstTokenLine
    | EndedLine
    | InstanceLostLine
    | InstanceJoinedLine
    | InstanceDrainingLine
    | InstanceLeftLine
    | RoomLentLine
    | RoomReturnedLine
)
