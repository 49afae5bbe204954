"""The loss of an instance makes batches void, and becomes an event when all others have left them."""

from collections.abc import Sequence
from dataclasses import dataclass

from loong.core.instance import ESPGroup
from loong.core.instructions import MoveKV, RequestInput, RunBatch, StopLease
from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, KVMigration, QueryBlock, Transfer
from loong.core.request import RequestId, SamplingParams
from loong.executor.in_flight import InFlight
from loong.executor.outstanding import Outstanding
from loong.executor.recovery import Backoff, Failures, Recovery
from loong.messages.wire import MigrationDone


def batch(batch_id: int, group: Sequence[InstanceId], *request_ids: RequestId) -> RunBatch:
    """Return a step of some requests, whose KV stays at the first of the group."""
    master = group[0]
    queries = [QueryBlock(r, range(4), master, Transfer.QUERY) for r in request_ids]
    writes = [KVSegment(r, range(4), master) for r in request_ids]
    given = [RequestInput(r, (1, 2, 3, 4), 4, 0, Placement(), SamplingParams()) for r in request_ids]
    return RunBatch(batch_id, BatchPlan(ESPGroup(tuple(group)), tuple(queries), tuple(writes)), tuple(given))


class Losses:
    """Losses of an executor that has sent batches to one worker on each of their instances."""

    def __init__(self, *batches: RunBatch) -> None:
        self.in_flight = InFlight()
        self.recovery = Recovery(self.in_flight)
        for one in batches:
            assert self.recovery.accepts(one)
            self.in_flight[one.batch_id].send((i, 0) for i in one.plan.group.instance_ids)

    def lose(self, instance_id: InstanceId) -> None:
        """Lose an instance, of which nothing more is expected."""
        self.recovery.lose(instance_id, "killed")
        for one in self.in_flight.values():
            one.workers.discard((instance_id, 0))

    def leave(self, *batch_ids: int) -> None:
        """Let all workers leave void batches."""
        for batch_id in batch_ids:
            self.in_flight[batch_id].workers.clear()

    def settled(self) -> tuple[list[int], dict[InstanceId, str]]:
        """Return the batches that are left and the losses that are events now."""
        left, losses = self.recovery.settle()
        return [one.batch_id for one in left], losses

    def reported(self, instance_id: InstanceId) -> tuple[int, ...]:
        """Return the batches that the event of a loss names."""
        self.recovery.see(instance_id)
        return self.recovery.report()


def test_batches_with_a_lost_instance_are_void_and_so_are_later_ones_of_their_requests() -> None:
    losses = Losses(
        batch(1, (0, 2), "a"), batch(2, (0, 1), "b"), batch(3, (0,), "b", "c"), batch(4, (2,), "c")
    )
    losses.lose(1)
    assert losses.in_flight.void_ids == {2, 3, 4}


def test_a_batch_before_a_void_one_of_its_request_goes_on_whatever_comes_later() -> None:
    losses = Losses(batch(1, (0,), "a"), batch(2, (0, 1), "a"))
    losses.lose(1)
    assert not losses.recovery.accepts(batch(3, (2,), "a"))
    assert losses.in_flight.void_ids == {2, 3}


def test_a_loss_is_an_event_only_when_all_workers_have_left_all_void_batches() -> None:
    losses = Losses(batch(1, (0, 1), "a"), batch(2, (0,), "a"))
    losses.lose(1)
    assert losses.settled() == ([], {})
    losses.leave(1)
    assert losses.settled() == ([], {})
    losses.leave(2)
    assert losses.settled() == ([1, 2], {1: "killed"})
    assert losses.reported(1) == (1, 2)
    assert losses.recovery.accepts(batch(3, (0,), "a"))


def test_a_plan_made_before_the_loss_was_seen_is_void_and_named_by_the_event() -> None:
    losses = Losses(batch(1, (0, 1), "a"))
    losses.lose(1)
    losses.leave(1)
    assert losses.settled() == ([1], {1: "killed"})
    assert not losses.recovery.accepts(batch(2, (2,), "a"))  # its request lost KV
    assert not losses.recovery.accepts(batch(3, (1, 2), "b"))  # its instance is gone
    assert losses.recovery.accepts(batch(4, (2,), "c"))
    assert losses.reported(1) == (1, 2, 3)
    assert losses.recovery.accepts(batch(5, (2,), "a"))


def test_nothing_of_a_void_batch_and_no_move_of_a_lost_instance_is_carried_out() -> None:
    losses = Losses(batch(1, (0, 1), "a"), batch(2, (0,), "b"))
    losses.lose(1)
    assert losses.recovery.refuses(StopLease(1, ESPGroup((0, 1)), 3))
    assert not losses.recovery.refuses(StopLease(2, ESPGroup((0,)), 3))
    assert losses.recovery.refuses(MoveKV(7, KVMigration(KVSegment("b", range(4), 0), 1)))
    assert not losses.recovery.refuses(MoveKV(8, KVMigration(KVSegment("b", range(4), 0), 2)))


def test_batches_of_two_losses_are_settled_together() -> None:
    losses = Losses(batch(1, (0, 1), "a"), batch(2, (0, 2), "b"))
    losses.lose(1)
    losses.leave(1)
    losses.lose(2)
    assert losses.settled() == ([], {})
    losses.leave(2)
    assert losses.settled() == ([1, 2], {1: "killed", 2: "killed"})
    assert losses.reported(1) == (1, 2)
    assert not losses.recovery.accepts(batch(3, (0,), "b"))  # planned before the second loss was seen
    assert losses.reported(2) == (3,)
    assert losses.recovery.accepts(batch(4, (0,), "b"))
    assert list(losses.in_flight) == [4]


def test_a_batch_that_a_worker_left_is_void_and_so_is_the_one_behind_it() -> None:
    losses = Losses(batch(1, (0,), "a"), batch(2, (2,), "a"), batch(3, (2,), "b"))
    for _ in range(2):  # workers
        losses.recovery.fail(losses.in_flight[1])
    assert losses.in_flight.void_ids == {1, 2}


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
