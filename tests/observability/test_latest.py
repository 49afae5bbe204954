"""The memory of histories is bounded for any contents."""

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest
from ended_batches import ended
from hypothesis import given
from hypothesis import strategies as st
from new_garbage import only_new_garbage

from loong.core.applied import Applied
from loong.core.events import BatchFinished, InstanceLost, MigrationFinished, RequestAborted, RequestArrived
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.instructions import Instruction, MoveKV, RequestInput, RunBatch
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, QueryBlock, Transfer
from loong.core.request import FinishReason, Request, SamplingParams
from loong.core.snapshot import Snapshot
from loong.observability.decision_log.lines import EndedLine
from loong.observability.decision_log.recent import RecentLines
from loong.observability.latest import Latest
from loong.observability.request_spans import RequestSpans
from loong.observability.timeline import Timeline

BYTES = 2**18
NUM_BOUNDS = 3  # so often what fits is pushed
INSTANCES = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 10**9) for i in range(8))

numbers = count(10**9)


def request_id() -> str:
    return f"chatcmpl-{next(numbers):032x}-0"


def finish(timeline: Timeline, reported: Instruction, event: BatchFinished | MigrationFinished) -> None:
    timeline.on_plan([], Snapshot(event.time - 0.1, INSTANCES), IterationPlan(), [reported])
    timeline.on_event(event, ended(reported, event.time) if isinstance(reported, RunBatch) else Applied())
    timeline.on_plan([event], Snapshot(event.time, INSTANCES), IterationPlan(), [])


def push_batch(timeline: Timeline, num_requests: int, dop: int) -> None:
    number, ids = next(numbers), [request_id() for _ in range(num_requests)]
    queries = tuple(QueryBlock(i, range(1), 0, Transfer.QUERY) for i in ids)
    writes = tuple(KVSegment(i, range(1), 0) for i in ids)
    inputs = tuple(RequestInput(i, range(1), 1, 0, Placement(), None) for i in ids)
    plan = BatchPlan(ESPGroup(tuple(range(dop))), queries, writes)
    finish(timeline, RunBatch(number, plan, inputs), BatchFinished(float(number), number, 1))


def push_move(timeline: Timeline) -> None:
    number = next(numbers)
    move = MoveKV(number, KVMigration(KVSegment(request_id(), range(number), 0), 1))
    finish(timeline, move, MigrationFinished(float(number), number, is_committed=True))


def push_line(recent: RecentLines, num_letters: int) -> None:
    recent(EndedLine(0.0, "r", FinishReason.STOP, 1), bytes(num_letters))


@contextmanager
def bytes_at_most(bound: int) -> Iterator[None]:
    """Fail unless memory allocated and kept inside the context is within the bound."""
    with only_new_garbage():
        tracemalloc.start()
        try:
            yield
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert bound / 3 < held <= bound


@given(st.lists(st.integers(0, 40)), st.integers(0, 100))
def test_what_is_kept_is_the_newest_that_fits(sizes: list[int], bound: int) -> None:
    latest = Latest[int](bound, lambda size: size)
    for size in sizes:
        latest.append(size)
    kept = list(latest)
    assert kept == sizes[len(sizes) - len(kept) :]
    assert sum(kept) <= bound
    dropped = sizes[: len(sizes) - len(kept)]
    assert not dropped or sum(kept) + dropped[-1] > bound or max(sizes) > bound
    assert len(latest) == len(kept)


@pytest.mark.parametrize(("num_requests", "dop"), [(1, 1), (1, 8), (300, 1)])
def test_batches_take_no_more_memory_than_their_bound(num_requests: int, dop: int) -> None:
    timeline = Timeline(max_batch_bytes=BYTES)
    with bytes_at_most(BYTES):
        for _ in range(NUM_BOUNDS * BYTES // (500 + 100 * num_requests)):
            push_batch(timeline, num_requests, dop)
    assert timeline.history().batches[-1].batch_id == next(numbers) - num_requests - 1


def test_moves_take_no_more_memory_than_their_bound() -> None:
    timeline = Timeline(max_move_bytes=BYTES)
    with bytes_at_most(BYTES):
        for _ in range(NUM_BOUNDS * BYTES // 300):
            push_move(timeline)
    assert timeline.history().moves


def test_changes_take_no_more_memory_than_their_bound() -> None:
    timeline = Timeline(max_change_bytes=BYTES)
    with bytes_at_most(BYTES):
        for _ in range(NUM_BOUNDS * BYTES // 256):
            time = float(next(numbers))
            timeline.on_event(InstanceLost(time, next(numbers), f"worker {time} was killed"), Applied())
    assert timeline.history().changes[-1].time == time


def test_requests_take_no_more_memory_than_their_bound() -> None:
    spans = RequestSpans(BYTES)
    with bytes_at_most(BYTES):
        for _ in range(NUM_BOUNDS * BYTES // 300):
            name = request_id()
            spans.on_event(RequestArrived(1.0, Request(name, range(5), SamplingParams(), arrival_time=1.0)))
            spans.on_event(RequestAborted(2.0, name))


@pytest.mark.parametrize("num_letters", [20, 300, 100_000])
def test_lines_take_no_more_memory_than_their_bound(num_letters: int) -> None:
    recent = RecentLines(BYTES)
    push_line(recent, 1)  # the first is kept in addition
    with bytes_at_most(BYTES):
        for _ in range(NUM_BOUNDS * BYTES // num_letters):
            push_line(recent, num_letters)
