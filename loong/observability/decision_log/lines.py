"""What the lines of a decision log say.

Times are seconds of the executor's clock, other durations seconds, sizes tokens. Batches and migrations have
the ids that the executor knows them by. What has its default is left out of a line.
"""

from typing import Literal, TypeAlias

import msgspec

VERSION = 4

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
]
InstanceKindName: TypeAlias = Literal["full", "attention", "host"]
TokensByInstance: TypeAlias = dict[int, int]


class _Part(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Something in a line."""


class _Line(_Part, frozen=True, tag_field="line"):
    """One line."""


class InstanceState(_Part, frozen=True):
    """An instance before a plan: tokens in its pool (reserved ones included), and the batch it runs."""

    instance_id: int
    kv_used: int
    kv_capacity: int
    kind: InstanceKindName = "full"
    batch_id: int | None = None


class Cause(_Part, frozen=True):
    """An event that called for a plan, and what it was about."""

    event: EventName
    request_id: str | None = None
    batch_id: int | None = None
    migration_id: int | None = None
    instance_id: int | None = None


class Chunk(_Part, frozen=True):
    """Prompt positions (or, after a preemption, known ones) of one request that a batch computes."""

    request_id: str
    first_position: int
    num_tokens: int
    computed_on: TokensByInstance
    kept_on: TokensByInstance
    num_output_tokens: int = 0  # that the request has had before

    @property
    def stop_position(self) -> int:
        """One more than its last position."""
        return self.first_position + self.num_tokens


class Decode(_Part, frozen=True):
    """One token a step of one request, computed and kept by its master."""

    request_id: str
    first_position: int
    master_id: int


class LoggedBatch(_Part, frozen=True):
    """A batch of up to `num_steps` steps; its group's instances are in ring order.

    Holders are the instances outside the group that serve attention over the KV that they hold.
    """

    batch_id: int
    instance_ids: tuple[int, ...]
    dop: int
    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[Decode, ...] = ()
    num_steps: int = 1
    predicted_seconds: float | None = None  # of one step
    holder_ids: tuple[int, ...] = ()

    @property
    def num_requests(self) -> int:
        """Requests that it computes something of."""
        return len(self.chunks) + len(self.decodes)


class Migration(_Part, frozen=True):
    """KV of one request at rest that goes from one instance to another."""

    migration_id: int
    request_id: str
    num_tokens: int
    source_id: int
    destination_id: int


class Preempted(_Part, frozen=True):
    """A request whose KV, here by instance, is dropped."""

    request_id: str
    kv: TokensByInstance


class EndedLease(_Part, frozen=True):
    """A lease told to end before `step`."""

    batch_id: int
    step: int


class ExtendedLease(_Part, frozen=True):
    """A lease that may go on up to so many steps."""

    batch_id: int
    num_steps: int


class ConsideredAlternative(_Part, frozen=True):
    """Something a policy could have done; a cost of None is beyond all numbers: impossible."""

    what: str
    cost: float | None


class Reason(_Part, frozen=True):
    """What a policy chose for some requests, and among what; `kind` is that of a `DecisionKind`."""

    kind: str
    request_ids: tuple[str, ...]
    chosen: str
    alternatives: tuple[ConsideredAlternative, ...] = ()


class StartedLine(_Line, frozen=True, tag="started"):
    """A run begins. `clock_start` is the Unix time at which its clock was 0; None where time is virtual."""

    version: int
    clock_start: float | None = None


class ArrivedLine(_Line, frozen=True, tag="arrived"):
    """A request came, and the instances as it found them.

    If it is another choice of `choice_of`, it begins when that has computed the prompt of both.
    """

    time: float
    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    instances: tuple[InstanceState, ...]
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    user: str = ""
    choice_of: str | None = None


class PlannedLine(_Line, frozen=True, tag="planned"):
    """A plan, why, and the instances that it was made for. Empty plans without reasons have no line."""

    time: float
    causes: tuple[Cause, ...]
    instances: tuple[InstanceState, ...]
    batches: tuple[LoggedBatch, ...] = ()
    migrations: tuple[Migration, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    ended_leases: tuple[EndedLease, ...] = ()
    extended_leases: tuple[ExtendedLease, ...] = ()
    reasons: tuple[Reason, ...] = ()


class BatchStartedLine(_Line, frozen=True, tag="batch_started"):
    """All instances of a batch have begun it, which may have been planned while they ran another."""

    time: float
    batch_id: int


class BatchEndedLine(_Line, frozen=True, tag="batch_ended"):
    """A batch is done: what one of its steps took on average, and what it was predicted to take."""

    time: float
    batch_id: int
    num_steps: int
    seconds: float
    predicted_seconds: float | None = None


class MigrationEndedLine(_Line, frozen=True, tag="migration_ended"):
    """A migration has committed, or was rolled back."""

    time: float
    migration_id: int
    is_committed: bool


class FirstTokenLine(_Line, frozen=True, tag="first_token"):
    """The first output token of a request was told."""

    time: float
    request_id: str


class EndedLine(_Line, frozen=True, tag="ended"):
    """A request is over; `reason` is that of a `FinishReason`, "abort" if its client left."""

    time: float
    request_id: str
    reason: str
    num_output_tokens: int


class InstanceLostLine(_Line, frozen=True, tag="instance_lost"):
    """An instance died with its KV; its batches and migrations never end."""

    time: float
    instance_id: int
    why: str = ""


class InstanceJoinedLine(_Line, frozen=True, tag="instance_joined"):
    """An instance came, empty."""

    time: float
    instance_id: int
    kv_capacity: int


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
)
