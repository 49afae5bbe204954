"""Derived properties of a snapshot, and the order of its requests."""

from dataclasses import replace

from loong.core.events import BatchFinished, RequestArrived, TokensProduced
from loong.core.events import ProducedToken as Token
from loong.core.instance import ElasticInstance, ESPGroup, InstanceKind
from loong.core.placement import KVSegment
from loong.core.plan import BatchPlan, IterationPlan, Preemption, QueryBlock, Transfer
from loong.core.request import Request, RequestId, SamplingParams
from loong.core.snapshot import Snapshot
from loong.state.cluster_state import ClusterState


def cluster(*request_ids: RequestId) -> ClusterState:
    instances = (
        ElasticInstance(0, 1, InstanceKind.FULL, 20),
        ElasticInstance(1, 1, InstanceKind.FULL, 10),
        ElasticInstance(2, 1, InstanceKind.HOST, 99),
    )
    state = ClusterState(instances)
    for request_id in request_ids:
        state.apply(RequestArrived(0.0, Request(request_id, range(4), SamplingParams(), arrival_time=0.0)))
    return state


def prefill(state: ClusterState, batch_id: int, request_id: RequestId, instance_id: int) -> None:
    """Compute all known tokens of a request on one instance, and its next token."""
    snapshot = state.snapshot(1.0)
    positions = range(snapshot.request[request_id].num_known_tokens)
    block = QueryBlock(request_id, positions, instance_id, Transfer.KV)
    writes = (KVSegment(request_id, positions, instance_id),)
    state.commit(IterationPlan((BatchPlan(ESPGroup((instance_id,)), (block,), writes),)), snapshot)
    state.apply(TokensProduced(1.0, batch_id, 0, (Token(request_id, 7),)))
    state.apply(BatchFinished(1.0, batch_id, 1))


def order(state: ClusterState) -> tuple[str, str]:
    """Return the requests that wait, and those that run."""
    snapshot = state.snapshot(1.0)
    assert_same_by_id(snapshot)
    return (
        "".join(view.request_id for view in snapshot.waiting),
        "".join(view.request_id for view in snapshot.running),
    )


def assert_same_by_id(snapshot: Snapshot) -> None:
    alone = replace(snapshot)  # makes its own indices
    assert (snapshot.request, snapshot.instance) == (alone.request, alone.instance)


def test_requests_wait_in_order_of_arrival_and_run_in_that_of_their_start() -> None:
    state = cluster(*"abcd")
    assert order(state) == ("abcd", "")
    prefill(state, 1, "c", 0)
    assert order(state) == ("abd", "c")
    prefill(state, 2, "b", 0)
    assert order(state) == ("ad", "cb")


def test_a_request_that_is_preempted_waits_where_it_came() -> None:
    state = cluster(*"abcd")
    for batch_id, request_id in enumerate("cab", 1):
        prefill(state, batch_id, request_id, 0)
    state.commit(IterationPlan(preemptions=(Preemption("b"), Preemption("c"))), state.snapshot(1.0))
    assert order(state) == ("bcd", "a")
    prefill(state, 4, "c", 1)
    assert order(state) == ("bd", "ac")


def test_a_snapshot_never_changes() -> None:
    state = cluster("a")
    before = state.snapshot(1.0)
    waiting, request, instance = before.waiting, dict(before.request), dict(before.instance)
    prefill(state, 1, "a", 0)
    assert (before.waiting, before.request, before.instance) == (waiting, request, instance)


def test_host_tiers_are_no_room_of_the_cluster() -> None:
    state = cluster("a")
    prefill(state, 1, "a", 1)
    snapshot = state.snapshot(1.0)
    assert (snapshot.kv_capacity, snapshot.kv_used) == (30, 4)


def test_an_emptied_snapshot_has_its_counts_and_no_request_batch_or_kv() -> None:
    state = ClusterState(cluster().snapshot(0.0).instances, keeps_prefixes=True)
    for request_id in "ab":
        state.apply(RequestArrived(0.0, Request(request_id, range(4), SamplingParams(), arrival_time=0.0)))
    prefill(state, 1, "a", 0)
    full = state.snapshot(1.0)
    assert full.owners or full.running
    assert full.kv_used > 0
    emptied = full.emptied()
    assert (emptied.stats, emptied.pools, emptied.kv_capacity) == (full.stats, full.pools, full.kv_capacity)
    assert (emptied.kv_used, emptied.is_anything_in_flight) == (0, False)
    assert not any((emptied.request, emptied.batches, emptied.owners, emptied.migrations, emptied.copies))
