"""The loss of an instance makes batches void, and becomes an event when all others have left them."""

from collections.abc import Sequence
from dataclasses import dataclass

from loong.core.events import InstanceLost
from loong.core.instance import ESPGroup
from loong.core.instructions import MoveKV, RequestInput, RunBatch, StopLease
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, KVMigration, QueryBlock, Transfer
from loong.core.request import RequestId, SamplingParams
from loong.executor.outstanding import Outstanding
from loong.executor.recovery import Backoff, Failures, Recovery
from loong.messages.wire import MigrationDone

LOST = InstanceLost(1.0, 1)


def batch(batch_id: int, group: Sequence[InstanceId], *request_ids: RequestId) -> RunBatch:
    """Return a step of some requests, whose KV stays at the first of the group."""
    master = group[0]
    queries = [QueryBlock(r, range(4), master, Transfer.QUERY) for r in request_ids]
    writes = [KVSegment(r, range(4), master) for r in request_ids]
    given = [RequestInput(r, (1, 2, 3, 4), 4, 0, Placement(), SamplingParams()) for r in request_ids]
    return RunBatch(batch_id, BatchPlan(ESPGroup(tuple(group)), tuple(queries), tuple(writes)), tuple(given))


def recovery_of(*batches: RunBatch, left: set[int] | None = None) -> Recovery:
    """Return one with these batches in flight, of which those in `left` are left by all workers."""
    recovery = Recovery(lambda batch_id: left is None or batch_id in left)
    assert all(recovery.accepts(one) for one in batches)
    return recovery


def test_batches_with_a_lost_instance_are_void_and_so_are_later_ones_of_their_requests() -> None:
    recovery = recovery_of(
        batch(1, (0, 2), "a"), batch(2, (0, 1), "b"), batch(3, (0,), "b", "c"), batch(4, (2,), "c")
    )
    recovery.lose(1, "killed")
    assert [recovery.is_void(batch_id) for batch_id in (1, 2, 3, 4)] == [False, True, True, True]


def test_a_loss_is_an_event_only_when_all_workers_have_left_all_void_batches() -> None:
    left: set[int] = set()
    recovery = recovery_of(batch(1, (0, 1), "a"), batch(2, (0,), "a"), left=left)
    recovery.lose(1, "killed")
    assert recovery.settle() == ([], {})
    left.add(1)
    assert recovery.settle() == ([], {})
    left.add(2)
    assert recovery.settle() == ([1, 2], {1: "killed"})
    assert recovery.reported(LOST).void_batch_ids == (1, 2)
    assert recovery.accepts(batch(3, (0,), "a"))


def test_a_plan_made_before_the_loss_was_seen_is_void_and_named_by_the_event() -> None:
    recovery = recovery_of(batch(1, (0, 1), "a"))
    recovery.lose(1, "killed")
    assert recovery.settle() == ([1], {1: "killed"})
    assert not recovery.accepts(batch(2, (2,), "a"))  # its request lost KV
    assert not recovery.accepts(batch(3, (1, 2), "b"))  # its instance is gone
    assert recovery.accepts(batch(4, (2,), "c"))
    assert recovery.reported(LOST).void_batch_ids == (1, 2, 3)
    assert recovery.accepts(batch(5, (2,), "a"))


def test_nothing_of_a_void_batch_and_no_move_of_a_lost_instance_is_carried_out() -> None:
    recovery = recovery_of(batch(1, (0, 1), "a"), batch(2, (0,), "b"))
    recovery.lose(1, "killed")
    assert recovery.refuses(StopLease(1, ESPGroup((0, 1)), 3))
    assert not recovery.refuses(StopLease(2, ESPGroup((0,)), 3))
    assert recovery.refuses(MoveKV(7, KVMigration(KVSegment("b", range(4), 0), 1)))
    assert not recovery.refuses(MoveKV(8, KVMigration(KVSegment("b", range(4), 0), 2)))


def test_batches_of_two_losses_are_settled_together() -> None:
    left = {1}
    recovery = recovery_of(batch(1, (0, 1), "a"), batch(2, (0, 2), "b"), left=left)
    recovery.lose(1, "killed")
    recovery.lose(2, "killed")
    assert recovery.settle() == ([], {})
    left.add(2)
    assert recovery.settle() == ([1, 2], {1: "killed", 2: "killed"})
    assert recovery.reported(LOST).void_batch_ids == (1, 2)
    assert not recovery.accepts(batch(3, (0,), "b"))  # planned before the second loss was seen
    left.add(3)  # it is never sent
    assert recovery.reported(InstanceLost(1.0, 2)).void_batch_ids == (3,)
    assert recovery.accepts(batch(4, (0,), "b"))


def test_a_migration_with_a_lost_end_is_rolled_back_though_that_end_had_reported_it() -> None:
    outstanding = Outstanding()
    outstanding.begin_migration(7, [(0, 0), (1, 0)])
    assert outstanding.end_migration(MigrationDone(7, 1, 0, is_committed=True)) is None
    assert outstanding.drop_workers([(1, 0)]) == []
    assert outstanding.has_one_ended_moves
    assert outstanding.end_migration(MigrationDone(7, 0, 0, is_committed=True)) is False
    assert not outstanding.has_one_ended_moves


def test_a_migration_between_two_lost_instances_is_over() -> None:
    outstanding = Outstanding()
    outstanding.begin_migration(7, [(0, 0), (1, 0)])
    assert outstanding.drop_workers([(1, 0)]) == []
    assert outstanding.drop_workers([(0, 0)]) == [7]
    assert not outstanding.has_one_ended_moves


BACKOFF = Backoff(first=1.0, longest=5.0, steady=10.0, max_failures=8)


@dataclass
class Clock:
    """A clock that a test moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_starts_wait_longer_after_each_failure_in_a_row_and_then_there_is_none() -> None:
    failures = Failures(BACKOFF, Clock())
    assert [failures.fail(1) for _ in range(9)] == [0, 1, 2, 4, 5, 5, 5, None, None]
    assert failures.fail(2) == 0.0, "another instance has failures of its own"
    failures.forget(1)
    assert failures.fail(1) == 0.0


def test_an_instance_that_has_served_for_long_begins_anew() -> None:
    failures = Failures(BACKOFF, clock := Clock())
    for _ in range(3):
        failures.fail(1)
    failures.join(1)
    clock.now = 11.0
    assert failures.fail(1) == 0.0


def test_the_time_that_a_start_takes_is_no_service() -> None:
    """An instance that loads for a minute and fails soon after has failed in a row."""
    failures = Failures(BACKOFF, clock := Clock())
    delays = []
    for _ in range(3):
        clock.now += 60.0
        failures.join(1)
        clock.now += 9.0
        delays.append(failures.fail(1))
    clock.now += 1000.0
    delays.append(failures.fail(1))  # a start that fails is no service either
    assert delays == [0, 1, 2, 4]
