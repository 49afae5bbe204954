"""Instances of several hosts work as one cluster: exact at every DoP, also after the loss of a host."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from cluster import Cluster, running_cluster
from leak_checks import shared_cluster
from plans import decode, move, plannable, prefill
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.instructions import RunBatch
from loong.core.plan import BatchPlan, IterationPlan, Transfer
from loong.core.snapshot import Snapshot
from loong.executor.recovery import Backoff
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy

NUM_TOKENS = 8


@pytest.fixture(scope="module")
def spread(folder: Path) -> Iterator[Cluster]:
    """Yield instances 0 and 1 on one host, 2 and 3 on another, each of two ranks, with host tiers."""
    config = ClusterConfig(
        str(folder), num_instances=4, num_hosts=2, tp_size=2, kv_capacity=192, host_kv_capacity=96
    )
    with shared_cluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def losing(folder: Path) -> Iterator[Cluster]:
    config = ClusterConfig(str(folder), num_instances=4, num_hosts=2, kv_capacity=256)
    with shared_cluster(config, backoff=Backoff(first=0.0, longest=0.0)) as running:
        yield running


@pytest.mark.parametrize("transfer", list(Transfer))
@pytest.mark.parametrize("group", [(2,), (1, 2), (3, 0, 1), (0, 1, 2, 3)])
def test_groups_across_hosts_are_exact_at_every_dop(
    spread: Cluster, folder: Path, group: tuple[int, ...], transfer: Transfer
) -> None:
    """Each request is prefilled in chunks by the group, and decoded by all its members as masters in turn."""
    requests = [greedy_request(random_prompt(length, seed=length), NUM_TOKENS) for length in (40, 9)]

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        if not all(instance.is_idle for instance in snapshot.instances if instance.instance_id in group):
            return IterationPlan()
        for view in plannable(snapshot):
            if not view.is_decoding:
                return IterationPlan((prefill([view], group, num_tokens=13, transfer=transfer),))
        views = plannable(snapshot)
        if not views:
            return IterationPlan()
        masters = {view.request_id: group[n % len(group)] for n, view in enumerate(views)}
        return IterationPlan((decode(views, group, masters, num_steps=3),))

    assert_exact(folder, requests, spread.run(requests, policy))


def test_kv_is_served_and_migrated_between_hosts(spread: Cluster, folder: Path) -> None:
    """A host prefills, the other decodes over its KV and then gets it."""
    request = greedy_request(random_prompt(30, seed=30), NUM_TOKENS)
    num_moves = 0

    def plan(snapshot: Snapshot) -> BatchPlan | None:
        for view in plannable(snapshot):
            if not view.is_decoding:
                return prefill([view], (0,), num_tokens=20, transfer=Transfer.QUERY)
            return decode([view], (3,), {view.request_id: 3}, num_steps=2)
        return None

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        nonlocal num_moves
        for view in plannable(snapshot):
            if view.num_output_tokens == 5 and num_moves == 0:
                num_moves += 1
                return IterationPlan(migrations=move(view, 0, 3))
        batch = plan(snapshot)
        return IterationPlan(() if batch is None else (batch,))

    assert_exact(folder, [request], spread.run([request], policy))
    assert num_moves == 1


def losing_once(cluster: Cluster, host_id: int, policy: Policy) -> Policy:
    """Return the policy, which loses a host once, when some request has output tokens."""
    has_lost = False

    def losing(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        nonlocal has_lost
        plan = policy(snapshot, cost_model)
        if not has_lost and any(view.num_output_tokens for view in snapshot.running):
            has_lost = True
            cluster.lose_host(host_id)
        return plan

    return losing


def test_streams_outlive_the_loss_of_a_host_and_a_new_one_joins(losing: Cluster, folder: Path) -> None:
    esp = make_policy("esp", PolicyConfig(max_num_batched_tokens=16, chunk_tokens=16, lease_steps=2))
    policy = losing_once(losing, 1, esp)
    requests = [greedy_request(random_prompt(40 + i, seed=i), 16) for i in range(4)]
    assert_exact(folder, requests, losing.run(requests, policy, timeout=90))
    assert losing.snapshot.stats.num_losses == 2
    assert {instance.instance_id for instance in losing.snapshot.instances} == {0, 1}
    losing.add_host(1)
    losing.wait_until(lambda snapshot: snapshot.stats.num_joins == 2, timeout=60)
    everywhere = make_policy("static-sp", PolicyConfig(chunk_tokens=16))
    again = [greedy_request(random_prompt(60, seed=60), 8)]
    assert_exact(folder, again, losing.run(again, everywhere))


def test_four_hosts_are_exact_at_every_dop_while_they_are_lost_and_come_back(folder: Path) -> None:
    """All instances that are there compute each request, and hosts are lost during its decode."""
    config = ClusterConfig(str(folder), num_instances=4, num_hosts=4, kv_capacity=256)
    everywhere = make_policy("static-sp", PolicyConfig(chunk_tokens=16, lease_steps=2))
    dops = set[int]()
    with running_cluster(config, backoff=Backoff(first=0.0, longest=0.0)) as cluster:

        def run(policy: Policy, seed: int) -> None:
            requests = [greedy_request(random_prompt(40, seed=seed), 16)]
            assert_exact(folder, requests, cluster.run(requests, policy, timeout=90))
            dops.update(item.plan.group.dop for item in cluster.log if isinstance(item, RunBatch))

        for host_id in (2, 1, 3):
            run(losing_once(cluster, host_id, everywhere), host_id)
        assert dops == {1, 2, 3, 4}
        assert cluster.snapshot.stats.num_losses == 3
        for host_id in (2, 1, 3):
            cluster.add_host(host_id)
        cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == 3, timeout=60)
        dops.clear()
        run(everywhere, 4)
        assert dops == {4}


def has_instances(number: int, snapshot: Snapshot) -> bool:
    return len(snapshot.instances) == number


def test_instances_join_and_leave_on_all_hosts(folder: Path) -> None:
    config = ClusterConfig(str(folder), num_instances=2, num_hosts=2, max_instances=4, kv_capacity=256)
    everywhere = make_policy("static-sp", PolicyConfig(chunk_tokens=16))
    with running_cluster(config, backoff=Backoff()) as cluster:
        for num_instances in (2, 4, 2):
            cluster.scale(num_instances)
            cluster.wait_until(partial(has_instances, num_instances), timeout=60)
            hosts = [instance.host_id for instance in cluster.snapshot.instances]
            assert sorted(hosts) == sorted([0, 1] * (num_instances // 2))
            requests = [greedy_request(random_prompt(40 + num_instances, seed=num_instances), NUM_TOKENS)]
            assert_exact(folder, requests, cluster.run(requests, everywhere))
