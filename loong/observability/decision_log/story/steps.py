"""What happens to a request, one thing after the other. Times and durations are seconds, sizes tokens."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from loong.observability.decision_log.lines import Cause, Reason, TokensByInstance


class _Step(msgspec.Struct, frozen=True, tag_field="step"):
    """Something that happens, from `time` on."""

    time: float


class WaitedFor(msgspec.Struct, frozen=True):
    """What the policy said that it waited for, and how long in all."""

    reason: str
    seconds: float


def summed(waits: Iterable[WaitedFor]) -> tuple[WaitedFor, ...]:
    """Each reason once, the longest first; without those that held for no time."""
    seconds = defaultdict[str, float](float)
    for wait in waits:
        seconds[wait.reason] += wait.seconds
    longest_first = sorted(seconds, key=seconds.__getitem__, reverse=True)
    return tuple(WaitedFor(reason, seconds[reason]) for reason in longest_first if seconds[reason])


class Wait(_Step, frozen=True, tag="wait"):
    """It has no KV and is in no batch, until None if the log ends before.

    `causes` are what it started on, and `kv_free` the room of all instances then; none if it did not.
    """

    until: float | None
    causes: tuple[Cause, ...] = ()
    kv_free: int | None = None
    waited_for: tuple[WaitedFor, ...] = ()
    reasons: tuple[Reason, ...] = ()


class StoryPart(msgspec.Struct, frozen=True):
    """Its part in one batch.

    `num_steps` are those that it took a part in and that the log saw end, from `time` to `until`. It computed
    `num_tokens` (in a decode, one a step) on `computed_on`, and their KV stays on `kept_on`.
    """

    time: float
    until: float | None
    batch_id: int
    first_position: int
    num_tokens: int
    computed_on: TokensByInstance
    kept_on: TokensByInstance
    num_steps: int
    max_steps: int  # that the batch might have taken
    num_others: int  # requests beside it
    predicted_seconds: float | None  # of one step
    paused_seconds: float  # with KV at rest, since the batch before it
    paused_for: tuple[int, ...]  # batches without it that ran where its KV was
    cut_short_by: tuple[Cause, ...]  # for which its lease was ended early

    @property
    def seconds(self) -> float:
        """What its steps took."""
        return self.until - self.time if self.until is not None and self.num_steps else 0.0


class ComputedBatches(_Step, frozen=True, tag="run"):
    """It is computed in batches, one after the other, on the same instances.

    Compared with the run before it, instances joined and left. What is recomputed was lost or dropped before.
    Holders are instances outside the group that served KV.
    """

    phase: Literal["prefill", "decode"]
    instance_ids: tuple[int, ...]
    joined_ids: tuple[int, ...]
    left_ids: tuple[int, ...]
    num_idle: int  # instances that could have run the first batch
    is_recomputed: bool
    parts: tuple[StoryPart, ...]
    waited_for: tuple[WaitedFor, ...]  # while it rested
    reasons: tuple[Reason, ...]
    holder_ids: tuple[int, ...] = ()


class Route(msgspec.Struct, frozen=True):
    """How much goes from one instance to another."""

    source_id: int
    destination_id: int
    num_tokens: int


class Move(_Step, frozen=True, tag="move"):
    """Its KV moves; what is not committed comes to nothing, None is open at the end of the log."""

    until: float | None
    routes: tuple[Route, ...]
    is_committed: bool | None
    reasons: tuple[Reason, ...] = ()


class Drop(_Step, frozen=True, tag="drop"):
    """Its KV is dropped, and other batches start there; `kv_free` is what all instances had free before."""

    kv: TokensByInstance
    batch_ids: tuple[int, ...]
    kv_free: int
    kv_capacity: int
    reasons: tuple[Reason, ...] = ()


class Loss(_Step, frozen=True, tag="loss"):
    """An instance dies, and all of its KV is lost or dropped."""

    instance_id: int
    why: str


class First(_Step, frozen=True, tag="first_token"):
    """Its first token."""

    ttft: float


class End(_Step, frozen=True, tag="end"):
    """It is over."""

    reason: str
    num_output_tokens: int


StoryStep: TypeAlias = Wait | ComputedBatches | Move | Drop | Loss | First | End
