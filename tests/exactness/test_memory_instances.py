"""Instances without weights hold KV and attend for the others: tokens are those of transformers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from chaos import chaos
from cluster import After, Cluster
from examples import seeds
from killed_workers import Victims, has_output, restarting_cluster
from leak_checks import shared_cluster
from machines import H200_GRAPH_LIMITS
from plans import decode, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt
from true_stories import assert_true

from loong.core.cost.cost_model import CostModel
from loong.core.instructions import RunBatch
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan, IterationPlan, Transfer
from loong.core.request import RequestView
from loong.core.snapshot import Snapshot
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

LENGTHS = (2, 5, 17, 29, 38, 52, 63)
NUM_TOKENS = 10


@pytest.fixture(scope="module")
def with_memory(folder: Path) -> Iterator[Cluster]:
    """Yield instances 0 and 1, and memory instances 2 and 3 with more room."""
    config = ClusterConfig(
        str(folder), num_instances=2, memory_instances=2, kv_capacity=96, memory_kv_capacity=160
    )
    with shared_cluster(config) as cluster:
        yield cluster


@pytest.mark.parametrize("seed", seeds(1, thorough=6))
def test_any_valid_plans_with_memory_instances_give_the_tokens_of_transformers(
    with_memory: Cluster, folder: Path, seed: int
) -> None:
    random = Random(seed)
    requests = [
        greedy_request(random_prompt(length, seed=length), NUM_TOKENS)
        for length in random.choices(LENGTHS, k=6)
    ]
    anchor, *late = requests
    arrivals = {r.request_id: After(anchor.request_id, random.randint(1, 8)) for r in late}
    outputs = with_memory.run(requests, chaos(seed), arrivals=arrivals)
    assert_exact(folder, requests, outputs)
    assert_true(with_memory.lines, with_memory.history)
    runs = [item for item in with_memory.log if isinstance(item, RunBatch)]
    assert {i for run in runs for i in run.plan.group.instance_ids} <= {*with_memory.full_ids}
    assert {i for run in runs for i in run.holder_ids} >= {*with_memory.memory_ids}


@pytest.mark.parametrize("name", ["lamina", "lamina-by-request", "lamina-rotational"])
def test_policies_that_offload_attention_give_the_tokens_of_transformers(
    with_memory: Cluster, folder: Path, name: str
) -> None:
    requests = [greedy_request(random_prompt(length, seed=length), 24) for length in (*LENGTHS, 200)]
    anchor, *late = requests
    arrivals = {request.request_id: After(anchor.request_id, 1 + n) for n, request in enumerate(late)}
    before = with_memory.snapshot.stats
    policy = make_policy(name, PolicyConfig(max_num_batched_tokens=64, lease_steps=4))
    assert_exact(folder, requests, with_memory.run(requests, policy, arrivals=arrivals))
    assert_true(with_memory.lines, with_memory.history)
    stats = with_memory.snapshot.stats
    assert stats.num_pushed_tokens > before.num_pushed_tokens
    assert stats.num_micro_batched_leases > before.num_micro_batched_leases
    assert stats.num_served_tokens > before.num_served_tokens
    assert stats.num_preemptions == before.num_preemptions


def test_esp_keeps_kv_on_memory_instances_where_room_is_short(with_memory: Cluster, folder: Path) -> None:
    """All outputs need more room than instances with weights have."""
    requests = [greedy_request(random_prompt(20 + i, seed=i), 40) for i in range(7)]
    before, policy = with_memory.snapshot.stats, make_policy("esp", PolicyConfig(lease_steps=8))
    assert_exact(folder, requests, with_memory.run(requests, policy))
    assert_true(with_memory.lines, with_memory.history)
    stats = with_memory.snapshot.stats
    assert stats.num_migrated_tokens > before.num_migrated_tokens
    assert stats.num_served_tokens > before.num_served_tokens
    assert stats.num_preemptions == before.num_preemptions


@pytest.mark.multigpu
def test_a_gpu_without_weights_serves_leases_and_chunks(folder: Path) -> None:
    config = ClusterConfig(
        str(folder),
        num_instances=1,
        memory_instances=1,
        kv_capacity=400,
        memory_kv_capacity=800,
        device="cuda",
        graph_limits=H200_GRAPH_LIMITS,
    )
    requests = [greedy_request(random_prompt(length, seed=length), 24) for length in (*LENGTHS, 200)]
    with shared_cluster(config) as cluster:
        policy = make_policy("lamina", PolicyConfig(max_num_batched_tokens=64, lease_steps=8))
        assert_exact(folder, requests, cluster.run(requests, policy))
        stats = cluster.snapshot.stats
    assert stats.num_pushed_tokens == sum(LENGTHS) + 200
    assert stats.num_served_leases > 0


@pytest.mark.parametrize(
    ("group", "number", "rotates"),
    [
        ((0,), 2, False),
        ((0,), 3, False),
        ((0,), 4, False),
        ((0, 1), 2, False),
        ((0, 1), 4, False),
        ((0, 1), 3, True),
        ((1, 0), 3, True),
    ],
)
def test_leases_in_micro_batches_give_the_tokens_of_transformers(
    with_memory: Cluster, folder: Path, group: tuple[InstanceId, ...], number: int, rotates: bool
) -> None:
    """The products of one part alternate with attention of the others; requests end at different steps."""
    memory_ids = with_memory.memory_ids

    def plan(view: RequestView) -> BatchPlan:
        return prefill([view], group, keep_on=(*group, *memory_ids), num_tokens=40, transfer=Transfer.QUERY)

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        views = plannable(snapshot)
        if not all(snapshot.instance[i].is_idle for i in group) or not views:
            return IterationPlan()
        if prompts := [view for view in views if not view.is_decoding]:
            return IterationPlan((plan(prompts[0]),))
        masters = {view.request_id: group[place % len(group)] for place, view in enumerate(views)}
        lease = decode(views, group, masters, num_steps=4)
        if rotates and len(views) < number:
            return IterationPlan((lease,))
        cut = replace(lease, num_micro_batches=min(number, len(views)), rotates=rotates)
        return IterationPlan((cut,))

    requests = [
        greedy_request(random_prompt(length, seed=length), 3 + i) for i, length in enumerate(LENGTHS[:6])
    ]
    before = with_memory.snapshot.stats.num_micro_batched_leases
    assert_exact(folder, requests, with_memory.run(requests, policy))
    assert with_memory.snapshot.stats.num_micro_batched_leases > before


@pytest.fixture(scope="module")
def restarting(folder: Path) -> Iterator[Victims]:
    """Yield instances 0 and 1, and memory instances 2 and 3, which start again if they are lost."""
    with restarting_cluster(
        ClusterConfig(str(folder), num_instances=2, memory_instances=2, kv_capacity=256)
    ) as victims:
        yield victims


@pytest.mark.parametrize(
    ("name", "first", "victims"),
    [("lamina", 2, 1), ("lamina", 2, 2), ("lamina", 1, 2), ("lamina-rotational", 1, 2)],
)
def test_streams_go_on_when_memory_instances_are_killed(
    restarting: Victims, folder: Path, name: str, first: int, victims: int
) -> None:
    cluster, before = restarting.cluster, restarting.cluster.snapshot.stats
    requests = [greedy_request(random_prompt(40 + i, seed=i), 16) for i in range(4)]
    policy = make_policy(name, PolicyConfig(max_num_batched_tokens=64, lease_steps=2))
    killing = restarting.killing(policy, has_output(3), first, victims)
    assert_exact(folder, requests, cluster.run(requests, killing, timeout=60))
    cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == before.num_joins + victims)
    stats = cluster.snapshot.stats
    assert stats.num_losses == before.num_losses + victims
    assert stats.num_recomputed_tokens > before.num_recomputed_tokens
    assert len(cluster.snapshot.instances) == 4


def test_memory_instances_leave_and_come_back_under_load(restarting: Victims, folder: Path) -> None:
    cluster, before = restarting.cluster, restarting.cluster.snapshot.stats
    offloading, numbers = make_policy("lamina", PolicyConfig(lease_steps=2)), [2, 1, 0, 2]

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        is_reached = len(snapshot.instances) == 2 + numbers[0]
        if is_reached and len(numbers) > 1 and has_output(2)(snapshot):
            numbers.pop(0)
            cluster.scale(2, numbers[0])
        return offloading(snapshot, cost_model)

    requests = [greedy_request(random_prompt(40 + i, seed=i), 60) for i in range(4)]
    assert_exact(folder, requests, cluster.run(requests, policy, timeout=60))
    assert len(numbers) < 4
    cluster.scale(2, 2)
    cluster.wait_until(lambda snapshot: len(snapshot.memory_pools) == 2 and not snapshot.draining_ids)
    stats = cluster.snapshot.stats
    assert stats.num_leaves > before.num_leaves
    assert stats.num_migrated_tokens > before.num_migrated_tokens
    assert stats.num_losses == before.num_losses
