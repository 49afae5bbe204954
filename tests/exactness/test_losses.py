"""Requests outlive the instances that compute them: their tokens are those of an undisturbed run."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from killed_workers import Victims, has_output, is_prefilling, restarting_cluster
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.snapshot import Snapshot
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import Policy, make_policy

NUM_INSTANCES = 3


@pytest.fixture(scope="module")
def restarting(folder: Path) -> Iterator[Victims]:
    with restarting_cluster(
        ClusterConfig(str(folder), num_instances=NUM_INSTANCES, kv_capacity=256)
    ) as victims:
        yield victims


def run_with_losses(
    restarting: Victims,
    folder: Path,
    policy: Policy,
    when: Callable[[Snapshot], bool],
    number: int,
    victims: int,
) -> None:
    """Run requests of which some lose instances, and wait until these have joined again."""
    cluster, before = restarting.cluster, restarting.cluster.snapshot.stats
    requests = [greedy_request(random_prompt(40 + i, seed=i), 16) for i in range(4)]
    outputs = cluster.run(requests, restarting.killing(policy, when, number, victims), timeout=60)
    assert_exact(folder, requests, outputs)
    cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == before.num_joins + victims)
    assert cluster.snapshot.stats.num_losses == before.num_losses + victims
    assert len(cluster.snapshot.instances) == NUM_INSTANCES


@pytest.mark.parametrize(
    ("name", "when", "victim"),
    [
        ("esp", is_prefilling, 0),
        ("esp", is_prefilling, 2),
        ("esp", has_output(1), 0),
        ("static-sp", has_output(7), 2),
        ("replicas", has_output(1), 0),
    ],
)
def test_no_token_is_lost_or_changed_when_an_instance_is_killed(
    restarting: Victims, folder: Path, name: str, when: Callable[[Snapshot], bool], victim: int
) -> None:
    policy = make_policy(name, PolicyConfig(max_num_batched_tokens=16, chunk_tokens=16, lease_steps=2))
    run_with_losses(restarting, folder, policy, when, victim, 1)


@pytest.mark.parametrize("victims", [2, 3])
def test_requests_outlive_the_loss_of_several_instances_at_once(
    restarting: Victims, folder: Path, victims: int
) -> None:
    run_with_losses(
        restarting, folder, make_policy("esp", PolicyConfig(lease_steps=2)), has_output(1), 0, victims
    )
