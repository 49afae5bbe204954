"""The losses of instances that count against a request: those in a row, without progress in between."""

import pytest
from plans import decode, prefill

from loong.core.events import (
    BatchEndPredicted,
    BatchFinished,
    BatchStarted,
    InstanceJoined,
    InstanceLost,
    MigrationFinished,
    ProducedToken,
    RequestAborted,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, Transfer
from loong.core.request import Request, RequestId, RequestView, SamplingParams
from loong.state.cluster_state import ClusterState

NUM_PROMPT, CAPACITY = 100, 400


def instance(instance_id: InstanceId) -> ElasticInstance:
    return ElasticInstance(instance_id, 1, InstanceKind.FULL, CAPACITY)


class Losing:
    """A cluster of three instances and the request r, which has a prompt of 100 tokens."""

    def __init__(self, *more_ids: RequestId, num_choices: int = 1) -> None:
        self.state = ClusterState(tuple(map(instance, range(3))))
        params = SamplingParams(max_tokens=20)
        for request_id in ("r", *more_ids):
            prompt = tuple(range(NUM_PROMPT))
            request = Request(request_id, prompt, params, arrival_time=0.0, num_choices=num_choices)
            self.state.apply(RequestArrived(0.0, request))

    def view(self, request_id: RequestId = "r") -> RequestView:
        return self.state.snapshot(1.0).request[request_id]

    def run(self, *batches: BatchPlan, starts: bool = True) -> int:
        """Commit batches, and return the id of the last."""
        self.state.commit(IterationPlan(batches), self.state.snapshot(1.0))
        for batch in self.state.snapshot(1.0).batches[-len(batches) :] if starts else ():
            self.state.apply(BatchStarted(1.0, batch.batch_id))
        return self.state.last_id

    def chunk(self, num_tokens: int, *group: InstanceId, request_id: RequestId = "r") -> BatchPlan:
        transfer = Transfer.KV if set(self.view(request_id).placement.instance_ids) <= {*group} else None
        return prefill(
            [self.view(request_id)], group, num_tokens=num_tokens, transfer=transfer or Transfer.QUERY
        )

    def finish(self, batch_id: int) -> None:
        self.state.apply(BatchFinished(2.0, batch_id, 1))

    def lose(self, instance_id: InstanceId) -> None:
        """Lose an instance, which joins again."""
        self.state.apply(InstanceLost(3.0, instance_id))
        self.state.apply(InstanceJoined(3.0, instance(instance_id)))
        self.state.check()

    def suspicion(self, request_id: RequestId = "r") -> tuple[int, range]:
        view = self.view(request_id)
        return view.num_losses, view.suspected


def test_losses_at_the_same_positions_count_in_a_row() -> None:
    losing = Losing()
    for number, (num_tokens, positions) in enumerate([(40, range(40)), (60, range(40)), (30, range(30))]):
        losing.run(losing.chunk(num_tokens, number % 3))
        losing.lose(number % 3)
        assert losing.suspicion() == (number + 1, positions)


def test_a_chunk_that_is_computed_ends_the_row() -> None:
    losing = Losing()
    losing.run(losing.chunk(40, 0, 1))
    losing.lose(0)
    losing.finish(losing.run(losing.chunk(30, 0, 1)))
    assert losing.suspicion() == (1, range(30, 40))
    losing.finish(losing.run(losing.chunk(30, 0, 1)))
    assert losing.suspicion() == (0, range(0))
    losing.run(losing.chunk(40, 0, 1))
    losing.lose(1)
    assert losing.suspicion() == (1, range(60, 100))


def test_kv_that_is_computed_again_clears_no_later_position() -> None:
    losing = Losing()
    losing.finish(losing.run(losing.chunk(50, 0)))
    for number in range(1, 4):
        losing.run(losing.chunk(20, 0))
        losing.lose(0)
        assert losing.suspicion() == (number, range(50, 70))
        losing.finish(losing.run(losing.chunk(50, 0)))


def test_a_loss_at_positions_that_were_computed_before_begins_another_row() -> None:
    losing = Losing()
    losing.finish(losing.run(losing.chunk(50, 0)))
    for _ in range(2):
        losing.run(losing.chunk(20, 0))
        losing.lose(0)
        losing.run(losing.chunk(30, 0))
        losing.lose(0)
        assert losing.suspicion() == (1, range(30))
        losing.finish(losing.run(losing.chunk(50, 0)))
        assert losing.suspicion() == (0, range(0))


def test_all_losses_that_are_not_in_the_row_are_counted_apart() -> None:
    losing = Losing()
    losing.finish(losing.run(losing.chunk(50, 0)))
    losing.lose(1)
    assert losing.view().num_other_losses == 1
    losing.run(losing.chunk(20, 0))
    losing.lose(0)
    assert losing.view().num_other_losses == 1
    losing.lose(2)
    assert losing.view().num_other_losses == 2
    losing.run(losing.chunk(30, 0))
    losing.lose(0)
    assert losing.view().num_other_losses == 3
    losing.finish(losing.run(losing.chunk(30, 0)))
    assert losing.view().num_other_losses == 4


def test_a_token_ends_the_row_and_a_lease_is_suspected_from_its_newest_token_on() -> None:
    losing = Losing()
    losing.run(losing.chunk(100, 0))
    losing.lose(0)
    batch_id = losing.run(losing.chunk(100, 0))
    losing.state.apply(TokensProduced(2.0, batch_id, 0, (ProducedToken("r", 7),)))
    assert losing.suspicion() == (0, range(0))
    losing.finish(batch_id)
    lease = losing.run(decode([losing.view()], (0,), {"r": 0}, num_steps=8))
    for step in range(3):
        losing.state.apply(TokensProduced(2.0, lease, step, (ProducedToken("r", 7),)))
    losing.lose(0)
    assert losing.suspicion() == (1, range(103, 108))


def test_every_request_of_the_batch_is_suspected_and_none_of_another() -> None:
    losing = Losing("s", "other", "waiting")
    together = prefill([losing.view(), losing.view("s")], (0, 1), num_tokens=10)
    losing.run(together, losing.chunk(10, 2, request_id="other"))
    losing.lose(1)
    found = {name: losing.suspicion(name)[0] for name in ("r", "s", "other", "waiting")}
    assert found == {"r": 1, "s": 1, "other": 0, "waiting": 0}


def test_a_batch_that_was_sent_and_never_began_has_no_part_in_a_loss() -> None:
    losing = Losing()
    losing.run(losing.chunk(40, 0), starts=False)
    losing.lose(0)
    assert losing.suspicion() == (0, range(0))


def test_a_batch_behind_one_that_is_ending_may_have_begun() -> None:
    losing = Losing("s")
    first = losing.run(losing.chunk(40, 0))
    losing.state.apply(BatchEndPredicted(1.0, first, 2.0))
    both = prefill([losing.view(), losing.view("s")], (0,), num_tokens=20)
    losing.run(both, starts=False)
    losing.lose(0)
    assert losing.suspicion() == (1, range(60))
    assert losing.suspicion("s") == (1, range(20))


def test_a_holder_that_is_lost_counts_against_the_requests_that_it_serves() -> None:
    losing = Losing("s")
    losing.finish(losing.run(losing.chunk(40, 0), losing.chunk(30, 1, request_id="s")))
    losing.finish(losing.state.last_id - 1)
    losing.run(losing.chunk(20, 2), losing.chunk(20, 1, request_id="s"))
    losing.lose(0)
    assert losing.suspicion() == (1, range(40, 60))
    assert losing.suspicion("s") == (0, range(0))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_migration_and_kv_at_rest_have_no_part_in_a_loss(victim: InstanceId) -> None:
    losing = Losing()
    losing.finish(losing.run(losing.chunk(40, 0)))
    moves = (KVMigration(KVSegment("r", range(20), 0), 1),)
    losing.state.commit(IterationPlan(migrations=moves), losing.state.snapshot(2.0))
    losing.lose(victim)
    assert losing.suspicion() == (0, range(0))


def test_a_migration_is_no_progress() -> None:
    losing = Losing()
    losing.run(losing.chunk(40, 0, 1))
    losing.lose(1)
    losing.finish(losing.run(losing.chunk(20, 0)))
    moves = (KVMigration(KVSegment("r", range(20), 0), 1),)
    losing.state.commit(IterationPlan(migrations=moves), losing.state.snapshot(2.0))
    losing.state.apply(MigrationFinished(2.0, losing.state.last_id, is_committed=True))
    assert losing.suspicion() == (1, range(20, 40))


def test_the_sibling_of_a_request_that_ends_is_suspected_like_it() -> None:
    losing = Losing(num_choices=2)
    losing.run(losing.chunk(40, 0))
    losing.lose(0)
    losing.state.apply(RequestAborted(3.0, "r"))
    (sibling,) = losing.state.snapshot(3.0).waiting
    assert (sibling.num_losses, sibling.suspected) == (1, range(40))
