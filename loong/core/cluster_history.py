"""The history of a cluster as values: batches, migrations, requests, and changes of instances."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.request import FinishReason, RequestId

TokensOf = tuple[tuple[InstanceId, int], ...]
"""Tokens in the pools of some instances."""


@dataclass(frozen=True, slots=True)
class BatchSlice:
    """A batch that ran. Times are the executor's.

    `kv_used` is of its group at its end, and `kv_reserved` at its beginning, with room for all that it may
    write. `num_prefill_tokens` and `longest_prompt` are of prompts of which it computes some; 0 without any.
    `holder_ids` are the instances outside its group that served it. `num_recomputed_tokens` had been computed
    before, and their KV was lost or dropped.
    """

    batch_id: int
    group: ESPGroup
    phase: Phase
    started_at: float
    ended_at: float
    request_ids: tuple[RequestId, ...]
    kv_used: TokensOf
    kv_reserved: TokensOf = ()
    num_prefill_tokens: int = 0
    longest_prompt: int = 0
    holder_ids: tuple[InstanceId, ...] = ()
    num_recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KVMove:
    """A migration that has ended; times are the executor's. A copy leaves its source as it is."""

    migration_id: int
    request_id: RequestId
    source_id: InstanceId
    destination_id: InstanceId
    num_tokens: int
    started_at: float
    ended_at: float
    is_committed: bool
    is_copy: bool = False


class ChangeKind(StrEnum):
    """The kind of a change of an instance."""

    LOST = "lost"
    JOINED = "joined"
    DRAINING = "draining"
    LEFT = "left"
    LENT = "lent"
    RETURNED = "returned"


@dataclass(frozen=True, slots=True)
class InstanceChange:
    """An instance was lost, joined, began to drain or left, or lent room or has it again.

    `reason` says why it was lost.
    """

    instance_id: InstanceId
    kind: ChangeKind
    time: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KVLevel:
    """The tokens in the pool of an idle instance from a time on, which no batch of its own has changed.

    Requests leave between batches, batches of other instances free KV that this one has served, and KV moves.
    """

    instance_id: InstanceId
    time: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A request from its arrival to its end.

    Times are the executor's, None for events that have not happened.
    """

    request_id: RequestId
    num_prompt_tokens: int
    arrived_at: float
    first_token_at: float | None = None
    ended_at: float | None = None
    end: FinishReason | None = None

    def moved_by(self, seconds: float) -> "RequestSpan":
        """Return the span on a clock that shows `seconds` more."""
        first, ended = self.first_token_at, self.ended_at
        return replace(
            self,
            arrived_at=self.arrived_at + seconds,
            first_token_at=None if first is None else first + seconds,
            ended_at=None if ended is None else ended + seconds,
        )


@dataclass(frozen=True, slots=True)
class ClusterHistory:
    """The last batches and migrations, in the order in which they ended, and the sizes of KV pools.

    `requests` are the last ones, those that have ended first. `changes` are the last ones of instances, and
    `kv_levels` the last ones that no batch shows.
    """

    batches: tuple[BatchSlice, ...] = ()
    moves: tuple[KVMove, ...] = ()
    kv_capacity: Mapping[InstanceId, int] = field(default_factory=dict)
    requests: tuple[RequestSpan, ...] = ()
    changes: tuple[InstanceChange, ...] = ()
    kv_levels: tuple[KVLevel, ...] = ()

    @property
    def instance_ids(self) -> list[InstanceId]:
        """Return every instance that ran a batch."""
        return sorted({instance_id for batch in self.batches for instance_id in batch.group.instance_ids})

    @property
    def end(self) -> float:
        """Return when the last batch ended; 0 if there is none."""
        return max((batch.ended_at for batch in self.batches), default=0.0)

    def on(self, instance_id: InstanceId) -> list[BatchSlice]:
        """Return the batches that an instance ran, in order.

        A batch that other members of its group ended later ends where the next one begins here.
        """
        own = [batch for batch in self.batches if instance_id in batch.group.instance_ids]
        own.sort(key=lambda batch: (batch.started_at, batch.batch_id))
        starts = [*(batch.started_at for batch in own[1:]), inf]
        return [
            replace(batch, ended_at=min(batch.ended_at, start))
            for batch, start in zip(own, starts, strict=True)
        ]

    def after(self, time: float) -> "ClusterHistory":
        """Return the part that started after `time`, on a clock that is 0 at its first request or batch."""
        batches = [batch for batch in self.batches if batch.started_at > time]
        requests = [span for span in self.requests if span.arrived_at > time]
        starts = (*(batch.started_at for batch in batches), *(span.arrived_at for span in requests))
        zero = min(starts, default=time)
        moves = [move for move in self.moves if move.started_at >= zero]
        return ClusterHistory(
            tuple(replace(b, started_at=b.started_at - zero, ended_at=b.ended_at - zero) for b in batches),
            tuple(replace(m, started_at=m.started_at - zero, ended_at=m.ended_at - zero) for m in moves),
            self.kv_capacity,
            tuple(span.moved_by(-zero) for span in requests),
            tuple(replace(c, time=c.time - zero) for c in self.changes if c.time >= zero),
            tuple(replace(level, time=level.time - zero) for level in self.kv_levels if level.time >= zero),
        )
