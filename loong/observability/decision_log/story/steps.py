"""The steps in the history of a request. Times and durations are seconds, sizes tokens."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from loong.core.cluster_history import ChangeKind
from loong.core.cost.work import Phase
from loong.core.plan import PreemptionReason
from loong.core.request import FinishReason
from loong.observability.decision_log.lines import Cause, Reason, TokensByInstance


class _Step(msgspec.Struct, frozen=True, tag_field="step"):
    """A step that begins at `time`."""

    time: float


class WaitedFor(msgspec.Struct, frozen=True):
    """A reason for waiting by the policy, and its total seconds."""

    reason: str
    seconds: float


def summed(waits: Iterable[WaitedFor]) -> tuple[WaitedFor, ...]:
    """Return each reason once, the longest first, without those of no duration."""
    seconds = defaultdict[str, float](float)
    for wait in waits:
        seconds[wait.reason] += wait.seconds
    longest_first = sorted(seconds, key=seconds.__getitem__, reverse=True)
    return tuple(WaitedFor(reason, seconds[reason]) for reason in longest_first if seconds[reason])


class InstanceChange(msgspec.Struct, frozen=True):
    """An instance was lost, joined, began to drain or left, or lent room or has it again; `why` it did."""

    time: float
    instance_id: int
    kind: ChangeKind
    why: str = ""


class Wait(_Step, frozen=True, tag="wait"):
    """The request waits without KV and is in no batch; `until` is None at the end of the log.

    `causes` are the events on which it started, and `kv_free` the free slots of all instances then; empty if
    it did not start. `changes` are those of instances meanwhile.
    """

    until: float | None
    causes: tuple[Cause, ...] = ()
    kv_free: int | None = None
    waited_for: tuple[WaitedFor, ...] = ()
    reasons: tuple[Reason, ...] = ()
    changes: tuple[InstanceChange, ...] = ()


class StoryPart(msgspec.Struct, frozen=True):
    """The request's part in one batch.

    `num_steps` are its steps that ended within the log, from `time` to `until` as the engine came to know it.
    Each took `step_seconds` as measured, if these are all steps of its batch. It computed `num_tokens` (in a
    decode, one each step) on `computed_on`, and their KV stays on `kept_on`.
    """

    time: float
    until: float | None
    batch_id: int
    first_position: int
    num_tokens: int
    computed_on: TokensByInstance
    kept_on: TokensByInstance
    num_steps: int
    max_steps: int  # most steps of the batch
    num_others: int  # other requests of the batch
    predicted_seconds: float | None  # of one step
    paused_seconds: float  # with KV but in no batch, since its last batch
    paused_for: tuple[int, ...]  # batches without it on the instances with its KV
    cut_short_by: tuple[Cause, ...]  # events for which its lease ended early
    step_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """The seconds of its steps: as measured, or as the engine saw them."""
        if self.until is None or not self.num_steps:
            return 0.0
        return self.until - self.time if self.step_seconds is None else self.num_steps * self.step_seconds


class ComputedBatches(_Step, frozen=True, tag="run"):
    """The request is computed in successive batches on the same instances.

    Joined and left instances are the difference to the batches before. Recomputed tokens were lost or dropped
    before. Repaired ones were lost or evicted while later KV stayed. Holders are instances outside the group
    that served KV. `cached` is KV, by instance, that it read instead of computing it as it began.
    """

    phase: Phase
    instance_ids: tuple[int, ...]
    joined_ids: tuple[int, ...]
    left_ids: tuple[int, ...]
    num_idle: int  # instances that could have run the first batch
    is_recomputed: bool
    parts: tuple[StoryPart, ...]
    waited_for: tuple[WaitedFor, ...]  # reasons of its pause
    reasons: tuple[Reason, ...]
    holder_ids: tuple[int, ...] = ()
    num_repaired: int = 0
    cached: TokensByInstance = {}


class Route(msgspec.Struct, frozen=True):
    """The number of tokens that move from one instance to another."""

    source_id: int
    destination_id: int
    num_tokens: int


class Move(_Step, frozen=True, tag="move"):
    """The request's KV moves. It has no effect unless committed; None is open at the end of the log."""

    until: float | None
    routes: tuple[Route, ...]
    is_committed: bool | None
    reasons: tuple[Reason, ...] = ()


class Drop(_Step, frozen=True, tag="drop"):
    """The request's KV is dropped, and other batches start there.

    `kv_free` is the free slots of all instances before.
    """

    kv: TokensByInstance
    batch_ids: tuple[int, ...]
    kv_free: int
    kv_capacity: int
    reasons: tuple[Reason, ...] = ()
    reason: PreemptionReason = PreemptionReason.NO_ROOM


class Evict(_Step, frozen=True, tag="evict"):
    """Some of the request's KV is dropped. `num_kept` tokens stay."""

    kv: TokensByInstance
    num_kept: int
    reasons: tuple[Reason, ...] = ()


class Loss(_Step, frozen=True, tag="loss"):
    """An instance is lost, with its KV of the request. What others have stays."""

    instance_id: int
    why: str
    num_lost: int
    num_kept: int


class Drain(_Step, frozen=True, tag="drain"):
    """An instance with KV of the request is to leave. Tokens are held there, and elsewhere."""

    instance_id: int
    num_held: int
    num_elsewhere: int


class First(_Step, frozen=True, tag="first_token"):
    """The request's first token."""

    ttft: float


class End(_Step, frozen=True, tag="end"):
    """The end of the request."""

    reason: FinishReason
    num_output_tokens: int


StoryStep: TypeAlias = Wait | ComputedBatches | Move | Drop | Evict | Loss | Drain | First | End
