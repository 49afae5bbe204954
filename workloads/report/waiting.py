"""Waiting requests of a run: a request waits while it is in no batch and no migration."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from loong.core.cluster_history import BatchSlice, ClusterHistory, RequestSpan
from loong.core.request import RequestId
from loong.workloads.report.timeline_cells import NUM_COLUMNS, Scale

Interval: TypeAlias = tuple[float, float]
"""Start and end, in seconds."""


@dataclass(frozen=True, slots=True)
class MeasuredWait:
    """A time in which a request waited."""

    span: RequestSpan
    start: float
    end: float


def batches_of_requests(history: ClusterHistory) -> Mapping[RequestId, Sequence[BatchSlice]]:
    """Return the batches of each request, by their beginnings."""
    batches: dict[RequestId, list[BatchSlice]] = defaultdict(list)
    for batch in sorted(history.batches, key=lambda batch: batch.started_at):
        for request_id in batch.request_ids:
            batches[request_id].append(batch)
    return batches


def waits_of(history: ClusterHistory) -> Iterator[MeasuredWait]:
    """Yield every time in which a request waited.

    Requests whose batches are no longer known are left out.
    """
    batches = batches_of_requests(history)
    moves: dict[RequestId, list[Interval]] = defaultdict(list)
    for move in history.moves:
        moves[move.request_id].append((move.started_at, move.ended_at))
    for span in history.requests:
        own = batches.get(span.request_id, ())
        if own or span.first_token_at is None:
            busy = chain(((batch.started_at, batch.ended_at) for batch in own), moves[span.request_id])
            end = history.end if span.ended_at is None else span.ended_at
            yield from (MeasuredWait(span, *gap) for gap in _gaps(span.arrived_at, sorted(busy), end))


def _gaps(start: float, busy: Iterable[Interval], end: float) -> Iterator[Interval]:
    """Yield the parts of a time span that are outside the busy intervals, which are sorted by start."""
    for begin, until in busy:
        if min(begin, end) > start:
            yield start, min(begin, end)
        start = max(start, until)
    if end > start:
        yield start, end


def waiting_by_column(waits: Iterable[MeasuredWait], scale: Scale) -> list[float]:
    """Return the mean number of waiting requests in each column."""
    seconds = [0.0] * NUM_COLUMNS
    for wait in waits:
        start, end = max(wait.start, scale.start), min(wait.end, scale.end)
        if start >= end:
            continue
        first, last = (
            min(int((time - scale.start) / scale.column), NUM_COLUMNS - 1) for time in (start, end)
        )
        for column in range(first, last + 1):
            inside = min(end, scale.time(column + 1)) - max(start, scale.time(column))
            seconds[column] += max(inside, 0.0)
    return [waited / scale.column for waited in seconds]
