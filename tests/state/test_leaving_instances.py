"""An instance drains, and leaves when nothing has a part in it."""

import pytest

from loong.core.errors import InvalidEventError, InvalidPlanError
from loong.core.events import (
    BatchFinished,
    InstanceDraining,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    MigrationFinished,
    ProducedToken,
    RequestArrived,
    TokensProduced,
)
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, QueryBlock, Transfer
from loong.core.request import Request, SamplingParams
from loong.state.cluster_state import ClusterState

PROMPT = (50, 51, 52, 53)


def instance(instance_id: int, kind: InstanceKind = InstanceKind.FULL) -> ElasticInstance:
    return ElasticInstance(instance_id, 1, kind, 20)


def cluster(*instance_ids: int) -> ClusterState:
    """Return instances, and the request r, whose prompt the first of them computes."""
    state = ClusterState(tuple(map(instance, instance_ids)))
    params = SamplingParams(max_tokens=8)
    state.apply(RequestArrived(0.0, Request("r", PROMPT, params, arrival_time=0.0)))
    state.commit(IterationPlan((prefill(instance_ids[0]),)), state.snapshot(0.0))
    return state


def prefill(instance_id: int) -> BatchPlan:
    block = QueryBlock("r", range(4), instance_id, Transfer.KV)
    return BatchPlan(ESPGroup((instance_id,)), (block,), (KVSegment("r", range(4), instance_id),))


def test_a_draining_instance_leaves_only_when_it_is_empty() -> None:
    state = cluster(0, 1)
    state.apply(InstanceDraining(1.0, 0))
    snapshot = state.snapshot(1.0)
    assert snapshot.draining_ids == {0}
    assert snapshot.pools == snapshot.free == {1: 20}
    assert (snapshot.instance[0].kv_free, snapshot.instance[0].is_idle, snapshot.kv_capacity) == (
        0,
        False,
        40,
    )
    with pytest.raises(InvalidEventError, match="instance 0 left, but"):
        state.apply(InstanceLeft(2.0, 0))
    state.apply(TokensProduced(2.0, 1, 0, (ProducedToken("r", 9),)))
    state.apply(BatchFinished(2.0, 1, 1))
    assert not state.snapshot(2.0).drained_ids
    move = KVMigration(KVSegment("r", range(4), 0), 1)
    state.commit(IterationPlan(migrations=(move,)), state.snapshot(2.0))
    assert not state.snapshot(2.0).drained_ids
    state.apply(MigrationFinished(3.0, 2, is_committed=True))
    state.check()
    assert state.snapshot(3.0).drained_ids == {0}
    state.apply(InstanceLeft(4.0, 0))
    state.check()
    snapshot = state.snapshot(4.0)
    assert (set(snapshot.instance), snapshot.stats.num_leaves, snapshot.stats.num_losses) == ({1}, 1, 0)


def test_an_instance_that_serves_a_batch_has_not_drained() -> None:
    state = cluster(0, 1)
    pushed = BatchPlan(
        ESPGroup((1,)), (QueryBlock("s", range(4), 1, Transfer.KV),), (KVSegment("s", range(4), 0),)
    )
    state.apply(RequestArrived(1.0, Request("s", PROMPT, SamplingParams(max_tokens=1), arrival_time=1.0)))
    state.commit(IterationPlan((pushed,)), state.snapshot(1.0))
    state.apply(InstanceDraining(1.0, 0))
    state.apply(TokensProduced(2.0, 1, 0, (ProducedToken("r", 9),)))
    state.apply(BatchFinished(2.0, 1, 1))
    assert state.snapshot(2.0).batch[2].holder_ids == (0,)
    assert not state.snapshot(2.0).drained_ids


@pytest.mark.parametrize(
    "plan",
    [
        IterationPlan((prefill(1),)),
        IterationPlan(
            (
                BatchPlan(
                    ESPGroup((0,)),
                    (QueryBlock("s", range(4), 0, Transfer.KV),),
                    (KVSegment("s", range(4), 1),),
                ),
            )
        ),
        IterationPlan(migrations=(KVMigration(KVSegment("r", range(4), 0), 1),)),
    ],
)
def test_a_draining_instance_gets_nothing_new(plan: IterationPlan) -> None:
    state = cluster(0, 1)
    state.apply(TokensProduced(1.0, 1, 0, (ProducedToken("r", 9),)))
    state.apply(BatchFinished(1.0, 1, 1))
    state.apply(RequestArrived(1.0, Request("s", PROMPT, SamplingParams(), arrival_time=1.0)))
    state.apply(InstanceDraining(1.0, 1))
    with pytest.raises(InvalidPlanError, match="instance 1 is draining"):
        state.commit(plan, state.snapshot(1.0))


def test_an_instance_that_is_lost_while_it_drains_may_return_or_leave() -> None:
    state = cluster(0, 1)
    state.apply(InstanceDraining(1.0, 0))
    state.apply(InstanceLost(2.0, 0, returns=True))
    assert state.snapshot(2.0).returning == {0: 20}
    state.apply(InstanceLeft(3.0, 0))
    state.check()
    snapshot = state.snapshot(3.0)
    assert (snapshot.returning, set(snapshot.instance), snapshot.stats.num_leaves) == ({}, {1}, 1)


@pytest.mark.parametrize(("instance_id", "reason"), [(2, "was not there"), (1, "does so already")])
def test_an_instance_cannot_drain_twice_or_unknown(instance_id: int, reason: str) -> None:
    state = cluster(0, 1)
    state.apply(InstanceDraining(1.0, 1))
    with pytest.raises(InvalidEventError, match=f"instance {instance_id} is to drain, but {reason}"):
        state.apply(InstanceDraining(2.0, instance_id))


def test_joins_after_the_start_are_counted_but_not_those_of_host_tiers() -> None:
    state = cluster(0)
    assert state.snapshot(0.0).stats.num_joins == 0
    state.apply(InstanceJoined(1.0, instance(1)))
    state.apply(InstanceJoined(1.0, instance(9, InstanceKind.HOST)))
    assert state.snapshot(1.0).stats.num_joins == 1
    state.apply(InstanceDraining(2.0, 9))
    state.apply(InstanceLeft(2.0, 9))
    state.check()
