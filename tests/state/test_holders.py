"""Holders outside a batch's group: they serve it, and are not members."""

import pytest

from loong.core.errors import InvalidPlanError
from loong.core.events import (
    BatchFinished,
    InstanceLost,
    MigrationFinished,
    ProducedToken,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.instructions import MoveKV, ReleaseKV, RunBatch
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, Preemption, QueryBlock, Transfer
from loong.core.request import FinishReason, Request, RequestId, SamplingParams
from loong.state.cluster_state import ClusterState


def alone(request_id: RequestId, positions: range, instance_id: InstanceId, num_steps: int = 1) -> BatchPlan:
    """Return some positions, or a lease from the first, at one master."""
    blocks = QueryBlock(
        request_id, positions[:1] if num_steps > 1 else positions, instance_id, Transfer.QUERY
    )
    writes = KVSegment(request_id, positions, instance_id)
    return BatchPlan(ESPGroup((instance_id,)), (blocks,), (writes,), num_steps)


class Stage:
    """Three instances; `a` has a prompt of 8 tokens on instance 0 and is decoded on instance 1."""

    def __init__(self) -> None:
        instances = tuple(ElasticInstance(i, 1, InstanceKind.FULL, 100) for i in range(3))
        self.state, self.time = ClusterState(instances), 0.0
        for request_id in "ab":
            params = SamplingParams(max_tokens=9)
            self.state.apply(RequestArrived(0.0, Request(request_id, (1,) * 8, params, arrival_time=0.0)))
        (prefill,) = self.commit(alone("a", range(8), 0))
        self.finish(prefill.batch_id, "a")
        (self.lease,) = self.commit(alone("a", range(8, 12), 1, num_steps=4))

    def commit(self, *batches: BatchPlan) -> tuple[RunBatch, ...]:
        instructions = self.state.commit(IterationPlan(batches), self.state.snapshot(self.time))
        return tuple(i for i in instructions if isinstance(i, RunBatch))

    def finish(
        self, batch_id: int, request_id: str, reason: FinishReason | None = None
    ) -> tuple[object, ...]:
        token = ProducedToken(request_id, 1, reason)
        self.state.apply(TokensProduced(self.time, batch_id, 0, (token,)))
        sent = self.state.apply(BatchFinished(self.time, batch_id, 1)).instructions
        self.state.check()
        return sent


def test_holders_follow_from_placements_and_are_no_members() -> None:
    stage = Stage()
    assert stage.lease.holder_ids == (0,)
    assert stage.lease.participant_ids == (1, 0)
    snapshot = stage.state.snapshot(1.0)
    (running,) = snapshot.batches
    assert (running.plan.group.instance_ids, running.holder_ids) == ((1,), (0,))
    assert [instance.is_idle for instance in snapshot.instances] == [True, False, True]


def test_a_holder_runs_a_batch_of_its_own_while_it_serves() -> None:
    stage = Stage()
    (own,) = stage.commit(alone("b", range(8), 0))
    assert own.holder_ids == ()
    stage.finish(own.batch_id, "b")
    assert [b.batch_id for b in stage.state.snapshot(2.0).batches] == [stage.lease.batch_id]


def test_kv_that_a_batch_reads_is_released_after_it_alone() -> None:
    stage = Stage()
    made_meanwhile = KVMigration(KVSegment("a", range(8, 9), 1), 2)
    with pytest.raises(InvalidPlanError, match="request a is in batch"):
        stage.state.commit(IterationPlan(preemptions=(Preemption("a"),)), stage.state.snapshot(1.0))
    with pytest.raises(InvalidPlanError, match="is to be moved, but is not there"):
        stage.state.commit(IterationPlan(migrations=(made_meanwhile,)), stage.state.snapshot(1.0))
    assert stage.finish(stage.lease.batch_id, "a", FinishReason.STOP) == (ReleaseKV("a", (0, 1)),)


def copying(stage: Stage) -> MoveKV:
    """Return the copy of `a`'s KV from instance 0 to instance 2 while the lease reads it."""
    move = KVMigration(KVSegment("a", range(8), 0), 2)
    (sent,) = stage.state.commit(IterationPlan(migrations=(move,)), stage.state.snapshot(1.0))
    assert isinstance(sent, MoveKV)
    assert sent.during_batch_id == stage.lease.batch_id
    return sent


def held_by(stage: Stage) -> dict[InstanceId, int]:
    return dict(stage.state.snapshot(2.0).request["a"].placement.tokens_by_instance())


def test_kv_is_copied_under_a_lease_and_switches_when_that_ends() -> None:
    stage = Stage()
    sent = copying(stage)
    assert stage.state.apply(MigrationFinished(2.0, sent.migration_id, is_committed=True)).instructions == ()
    stage.state.check()
    assert held_by(stage) == {0: 8}
    assert stage.finish(stage.lease.batch_id, "a") == (ReleaseKV("a", (0,), range(8)),)
    assert held_by(stage) == {2: 8, 1: 1}
    (lease,) = stage.commit(alone("a", range(9, 12), 1, num_steps=3))
    assert lease.holder_ids == (2,)


def test_a_copy_that_outlasts_its_lease_is_awaited_and_then_switched() -> None:
    stage = Stage()
    sent = copying(stage)
    assert stage.finish(stage.lease.batch_id, "a") == ()
    assert not stage.state.snapshot(2.0).request["a"].is_plannable
    released = stage.state.apply(MigrationFinished(3.0, sent.migration_id, is_committed=True)).instructions
    assert released == (ReleaseKV("a", (0,), range(8)),)
    assert held_by(stage) == {2: 8, 1: 1}


def test_a_copy_that_fails_leaves_kv_where_it_is() -> None:
    stage = Stage()
    sent = copying(stage)
    released = stage.state.apply(MigrationFinished(2.0, sent.migration_id, is_committed=False)).instructions
    assert released == (ReleaseKV("a", (2,), range(8)),)
    assert stage.finish(stage.lease.batch_id, "a") == ()
    assert held_by(stage) == {0: 8, 1: 1}


@pytest.mark.parametrize("lost_id", [0, 2])
def test_a_copy_is_forgotten_with_either_of_its_ends(lost_id: InstanceId) -> None:
    stage = Stage()
    sent = copying(stage)
    stage.state.apply(MigrationFinished(2.0, sent.migration_id, is_committed=True))
    stage.state.apply(InstanceLost(3.0, lost_id))
    stage.state.check()
    if lost_id == 2:
        stage.finish(stage.lease.batch_id, "a")
        assert held_by(stage) == {0: 8, 1: 1}
    else:  # the copy takes its place, and the lease is void
        assert held_by(stage) == {2: 8}
        assert sum(i.kv_used for i in stage.state.snapshot(4.0).instances) == 8


def test_a_batch_ends_with_a_holder_that_is_lost() -> None:
    stage = Stage()
    stage.state.apply(InstanceLost(1.0, 0))
    stage.state.check()
    snapshot = stage.state.snapshot(1.0)
    assert snapshot.batches == ()
    assert [instance.is_idle for instance in snapshot.instances] == [True, True]
    assert snapshot.request["a"].num_computed_tokens == 0
    assert sum(instance.kv_used for instance in snapshot.instances) == 0
