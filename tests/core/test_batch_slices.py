"""The batches and migrations that the timeline of `loong.observability.timeline` keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ended_batches import ended

from loong.core.applied import Applied
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
from loong.core.events import (
    BatchFinished,
    Event,
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    MigrationFinished,
    RequestAborted,
    RequestArrived,
)
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.instructions import Instruction, MoveKV, ReleaseKV, RequestInput, RunBatch
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, QueryBlock, Transfer
from loong.core.request import FinishReason, Request, SamplingParams
from loong.core.snapshot import Snapshot
from loong.observability.timeline import Timeline

INSTANCES = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 100, kv_used=10 * i) for i in range(3))
MOVE = MoveKV(5, KVMigration(KVSegment("r", range(0, 8, 2), 1), 2))


def history_of(
    reported: Sequence[Instruction], *events: Event, starts: Mapping[int, float] = MappingProxyType({})
) -> ClusterHistory:
    """Return what is kept when `reported` is planned at time 1, and then `events` come.

    Batches start at `starts`, or at time 1.
    """
    timeline, batches = Timeline(), {b.batch_id: b for b in reported if isinstance(b, RunBatch)}
    timeline.on_plan([InstanceLost(1.0, 9)], Snapshot(1.0, INSTANCES), IterationPlan(), reported)
    for event in events:
        applied = Applied()
        if isinstance(event, BatchFinished):
            applied = ended(batches[event.batch_id], starts.get(event.batch_id, 1.0), num_reserved=90)
        timeline.on_event(event, applied)
        timeline.on_plan([event], Snapshot(event.time, INSTANCES), IterationPlan(), ())
    return timeline.history()


def batch(batch_id: int, *group: int, inputs: Sequence[RequestInput] = ()) -> RunBatch:
    writes = tuple(KVSegment("r", range(7), instance_id) for instance_id in group)
    return RunBatch(batch_id, BatchPlan(ESPGroup(group), (), writes), tuple(inputs))


def times(history: ClusterHistory) -> list[tuple[int, float, float]]:
    return [(piece.batch_id, piece.started_at, piece.ended_at) for piece in history.batches]


def of_request(request_id: str, num_known: int, num_prompt: int, num_tokens: int) -> RequestInput:
    placement = Placement((KVSegment(request_id, range(num_known), 0),)) if num_known else Placement()
    num_output = max(num_known + num_tokens - num_prompt, 0)
    return RequestInput(request_id, range(num_tokens), num_prompt, num_output, placement, None)


def test_a_batch_is_kept_once_it_has_finished() -> None:
    reported = batch(1, 0, 1), batch(2, 2)
    assert times(history_of(reported, BatchFinished(3.0, 2, 1))) == [(2, 1.0, 3.0)]
    both = history_of(reported, BatchFinished(3.0, 2, 1), BatchFinished(4.0, 1, 1))
    assert times(both) == [(2, 1.0, 3.0), (1, 1.0, 4.0)]


def test_a_batch_begins_when_it_starts_and_not_when_it_is_planned() -> None:
    reported, events = (batch(1, 0, 1), batch(2, 0)), (BatchFinished(3.0, 1, 1), BatchFinished(4.0, 2, 1))
    assert times(history_of(reported, *events, starts={1: 1.5, 2: 2.5})) == [(1, 1.5, 3.0), (2, 2.5, 4.0)]


def test_on_an_instance_a_batch_ends_where_the_next_one_begins() -> None:
    reported, events = (batch(1, 0, 1), batch(2, 0)), (BatchFinished(3.0, 2, 1), BatchFinished(4.0, 1, 1))
    history = history_of(reported, *events, starts={1: 1.5, 2: 2.5})
    assert times(history) == [(2, 2.5, 3.0), (1, 1.5, 4.0)]
    on_both = [[(b.batch_id, b.started_at, b.ended_at) for b in history.on(i)] for i in (0, 1)]
    assert on_both == [[(1, 1.5, 2.5), (2, 2.5, 3.0)], [(1, 1.5, 4.0)]]


def test_a_batch_reports_the_kv_of_its_group_at_both_ends() -> None:
    (piece,) = history_of((ReleaseKV("r", (0,)), batch(1, 2, 1)), BatchFinished(3.0, 1, 1)).batches
    assert piece.kv_reserved == ((2, 90), (1, 90))
    assert piece.kv_used == ((2, 20), (1, 10))


def test_a_batch_reports_what_it_prefills() -> None:
    chunk, short, decoding = of_request("a", 30, 90, 40), of_request("b", 0, 5, 5), of_request("c", 8, 8, 1)
    reported = batch(1, 0, inputs=(chunk, short, decoding)), batch(2, 1, inputs=(decoding,)), batch(3, 2)
    history = history_of(reported, *(BatchFinished(2.0, i, 1) for i in (1, 2, 3)))
    assert [(b.phase, b.num_prefill_tokens, b.longest_prompt) for b in history.batches] == [
        ("mixed", 45, 90),
        ("decode", 0, 0),
        ("prefill", 0, 0),
    ]


def test_a_migration_is_kept_with_its_outcome() -> None:
    history = history_of((MOVE,), MigrationFinished(1.5, 5, is_committed=False))
    assert history.moves == (KVMove(5, "r", 1, 2, 4, 1.0, 1.5, is_committed=False),)


def test_a_copy_is_kept_as_one() -> None:
    copy = replace(MOVE, migration=replace(MOVE.migration, keeps_source=True))
    history = history_of((copy,), MigrationFinished(1.5, 5, is_committed=True))
    assert history.moves == (KVMove(5, "r", 1, 2, 4, 1.0, 1.5, is_committed=True, is_copy=True),)


def test_a_migration_whose_end_is_lost_is_never_kept() -> None:
    finished = MigrationFinished(3.0, 5, is_committed=True)
    assert not history_of((MOVE,), InstanceLost(2.0, 2), finished).moves
    assert history_of((MOVE,), InstanceLost(2.0, 0), finished).moves


def test_what_an_idle_instance_holds_is_reported_where_no_batch_of_its_own_shows_it() -> None:
    timeline, batches = Timeline(), {1: batch(1, 0, 1), 2: batch(2, 2)}

    def plan(time: float, event: Event, used: Sequence[int], *reported: Instruction) -> None:
        instances = tuple(i.using(n) for i, n in zip(INSTANCES, used, strict=True))
        applied = ended(batches[event.batch_id], 1.0) if isinstance(event, BatchFinished) else Applied()
        timeline.on_event(event, applied)
        timeline.on_plan([event], Snapshot(time, instances), IterationPlan(), reported)

    plan(1.0, InstanceLost(1.0, 9), (0, 0, 0), batches[1])
    plan(2.0, BatchFinished(2.0, 1, 1), (7, 7, 0), batches[2])
    plan(3.0, BatchFinished(3.0, 2, 1), (0, 7, 8))  # instance 0 served it
    plan(4.0, RequestAborted(4.0, "r"), (0, 0, 0))
    history = timeline.history()
    assert [piece.kv_used for piece in history.batches] == [((0, 7), (1, 7)), ((2, 8),)]
    assert history.kv_levels == (KVLevel(0, 3.0, 0), KVLevel(1, 4.0, 0), KVLevel(2, 4.0, 0))
    assert [level.time for level in history.after(0.5).kv_levels] == [2.0, 3.0, 3.0]


def test_the_sizes_of_pools_are_reported() -> None:
    assert history_of((batch(1, 2, 0),)).kv_capacity == {0: 100, 2: 100}


def test_a_run_begins_at_its_first_batch_after_the_warm_up() -> None:
    pieces = [BatchSlice(i, ESPGroup((i,)), Phase.DECODE, 2.0 * i, 2.0 * i + 1, (), ()) for i in range(4)]
    moves = [KVMove(i, "r", 0, 1, 4, time, time + 1, is_committed=True) for i, time in ((0, 1.5), (1, 5.0))]
    history = ClusterHistory(tuple(pieces), tuple(moves), {0: 9}).after(2.5)
    assert times(history) == [(2, 0.0, 1.0), (3, 2.0, 3.0)]
    assert [(move.migration_id, move.started_at) for move in history.moves] == [(1, 1.0)]
    assert (history.instance_ids, history.end, history.kv_capacity) == ([2, 3], 3.0, {0: 9})
    assert history.after(9.0) == ClusterHistory((), (), {0: 9})


def test_requests_that_came_after_a_time_begin_a_clock_of_its_own() -> None:
    requests = (
        RequestSpan("a", 5, 1.0, 2.0, 3.0, FinishReason.STOP),
        RequestSpan("b", 5, 4.0, 6.0, 7.0, FinishReason.STOP),
    )
    later = ClusterHistory((), (), {}, (*requests, RequestSpan("c", 5, 5.0))).after(3.5)
    assert later.requests == (RequestSpan("b", 5, 0.0, 2.0, 3.0, FinishReason.STOP), RequestSpan("c", 5, 1.0))


def test_changes_of_instances_are_kept_with_their_reasons() -> None:
    events = (
        InstanceLost(2.0, 1, "it was killed", returns=True),
        InstanceJoined(3.0, INSTANCES[1]),
        InstanceDraining(4.0, 2),
        InstanceLeft(5.0, 2),
    )
    changes = history_of((), *events).changes
    assert changes == (
        InstanceChange(1, ChangeKind.LOST, 2.0, "it was killed"),
        InstanceChange(1, ChangeKind.JOINED, 3.0),
        InstanceChange(2, ChangeKind.DRAINING, 4.0),
        InstanceChange(2, ChangeKind.LEFT, 5.0),
    )
    assert [change.time for change in ClusterHistory(changes=changes).after(2.5).changes] == [0.5, 1.5, 2.5]


def chunk(
    batch_id: int, first: int, stop: int, params: SamplingParams | None, num_output: int = 0
) -> RunBatch:
    """Return a batch that computes some positions of a prompt of 8 tokens."""
    placement = Placement((KVSegment("r", range(first), 0),)) if first else Placement()
    given = RequestInput("r", range(first, stop), 8, num_output, placement, params)
    block = QueryBlock("r", range(first, stop), 0, Transfer.KV)
    return RunBatch(batch_id, BatchPlan(ESPGroup((0,)), (block,), ()), (given,))


def recomputed(*batches: RunBatch, aborts_before: int | None = None) -> list[int]:
    """Return how many tokens of each batch count as computed again."""
    timeline = Timeline()
    request = Request("r", tuple(range(8)), SamplingParams(), arrival_time=0.0)
    timeline.on_event(RequestArrived(0.0, request), Applied())
    for reported in batches:
        timeline.on_plan([], Snapshot(1.0, INSTANCES), IterationPlan(), (reported,))
        if reported.batch_id == aborts_before:
            timeline.on_event(RequestAborted(1.5, "r"), Applied())
        timeline.on_event(BatchFinished(2.0, reported.batch_id, 1), ended(reported, 1.0))
    return [piece.num_recomputed_tokens for piece in timeline.history().batches]


def test_a_batch_reports_how_much_of_a_prompt_it_computes_again() -> None:
    params = SamplingParams()
    assert recomputed(chunk(1, 0, 4, None), chunk(2, 4, 8, params)) == [0, 0]
    assert recomputed(chunk(1, 0, 4, None), chunk(2, 0, 3, None), chunk(3, 3, 8, params)) == [0, 3, 1]
    assert recomputed(chunk(1, 0, 8, params), chunk(2, 0, 11, params, num_output=3)) == [0, 10]


def test_nothing_is_remembered_of_a_request_that_has_ended() -> None:
    first, again = chunk(1, 0, 4, None), chunk(2, 0, 4, None)
    assert recomputed(first, again, aborts_before=1) == [0, 0]
    assert recomputed(first, again, aborts_before=2) == [0, 0]
