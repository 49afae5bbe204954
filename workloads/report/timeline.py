"""Reads a history back from a Chrome trace: a server's `/trace`, or a run's file."""

from itertools import groupby
from operator import attrgetter
from typing import Annotated

import msgspec

from loong.core.cluster_history import (
    BatchSlice,
    ChangeKind,
    ClusterHistory,
    InstanceChange,
    KVLevel,
    KVMove,
    RequestSpan,
)
from loong.core.cost.work import Phase
from loong.core.instance import ESPGroup
from loong.core.request import FinishReason

MICROSECOND = 1e-6


class _WireEvent(msgspec.Struct):
    ph: str
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    id: int | str = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def started_at(self) -> float:
        return self.ts * MICROSECOND

    @property
    def ended_at(self) -> float:
        return (self.ts + self.dur) * MICROSECOND


class _WireBatch(msgspec.Struct):
    batch_id: int
    group: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    phase: Phase
    request_ids: tuple[str, ...] = ()
    num_prefill_tokens: int = 0
    longest_prompt: int = 0
    num_recomputed_tokens: int = 0
    holders: tuple[int, ...] = ()
    kv_reserved: int | None = None
    kv_used: int | None = None


class _WireMove(msgspec.Struct):
    migration_id: int
    request_id: str
    source_id: int
    destination_id: int
    num_tokens: int
    is_committed: bool
    is_copy: bool = False


class _WireRequest(msgspec.Struct):
    num_prompt_tokens: int
    first_token_at: float | None = None
    ended_at: float | None = None
    end: FinishReason | None = None


class _WireChange(msgspec.Struct):
    kind: ChangeKind
    reason: str = ""


class _WireOther(msgspec.Struct):
    kv_capacity: dict[int, int] = {}


class _WireTrace(msgspec.Struct):
    traceEvents: list[_WireEvent]  # noqa: N815  the format's own name
    otherData: _WireOther = msgspec.field(default_factory=_WireOther)  # noqa: N815


def parse_trace(trace: bytes) -> ClusterHistory:
    """Read what `loong.server.metrics.trace` wrote; events of other kinds are left out.

    Raises:
        msgspec.MsgspecError: the bytes are not a Chrome trace.
    """
    found = msgspec.json.decode(trace, type=_WireTrace, strict=False)
    events = [event for event in found.traceEvents if event.ph == "X"]
    requests = [_request(event) for event in found.traceEvents if (event.ph, event.cat) == ("b", "request")]
    batches = [
        (event, msgspec.json.decode(event.args, type=_WireBatch)) for event in events if event.cat == "batch"
    ]
    batches.sort(key=lambda pair: pair[1].batch_id)
    slices = [_batch(list(same)) for _, same in groupby(batches, key=lambda pair: pair[1].batch_id)]
    moves = [_move(event) for event in events if event.cat == "kv_out"]
    changes = [_change(event) for event in found.traceEvents if (event.ph, event.cat) == ("i", "instance")]
    return ClusterHistory(
        tuple(sorted(slices, key=attrgetter("ended_at"))),
        tuple(sorted(moves, key=attrgetter("ended_at"))),
        found.otherData.kv_capacity,
        tuple(sorted(requests, key=lambda span: (span.ended_at is None, span.ended_at or span.arrived_at))),
        tuple(changes),
        tuple(_level(e) for e in found.traceEvents if (e.ph, e.cat) == ("C", "kv_level")),
    )


def _batch(parts: list[tuple[_WireEvent, _WireBatch]]) -> BatchSlice:
    """Return a batch from its slices, one on the track of each instance, which may end at different times."""
    event, batch = max(parts, key=lambda part: part[0].ended_at)
    on = {int(event.tid): part for event, part in parts}
    members = [(i, on[i]) for i in batch.group if i in on]
    return BatchSlice(
        batch.batch_id,
        ESPGroup(batch.group),
        batch.phase,
        event.started_at,
        event.ended_at,
        batch.request_ids,
        tuple((i, part.kv_used) for i, part in members if part.kv_used is not None),
        tuple((i, part.kv_reserved) for i, part in members if part.kv_reserved is not None),
        batch.num_prefill_tokens,
        batch.longest_prompt,
        batch.holders,
        batch.num_recomputed_tokens,
    )


def _change(event: _WireEvent) -> InstanceChange:
    change = msgspec.json.decode(event.args, type=_WireChange)
    return InstanceChange(int(event.tid), change.kind, event.started_at, change.reason)


def _level(event: _WireEvent) -> KVLevel:
    (num_tokens,) = msgspec.json.decode(event.args, type=dict[str, int]).values()
    return KVLevel(int(event.tid), event.started_at, num_tokens)


def _request(event: _WireEvent) -> RequestSpan:
    span = msgspec.json.decode(event.args, type=_WireRequest)
    return RequestSpan(
        str(event.id),
        span.num_prompt_tokens,
        event.started_at,
        span.first_token_at,
        span.ended_at,
        span.end,
    )


def _move(event: _WireEvent) -> KVMove:
    move = msgspec.json.decode(event.args, type=_WireMove)
    return KVMove(
        move.migration_id,
        move.request_id,
        move.source_id,
        move.destination_id,
        move.num_tokens,
        event.started_at,
        event.ended_at,
        move.is_committed,
        move.is_copy,
    )
