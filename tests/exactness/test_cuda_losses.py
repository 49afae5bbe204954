"""Requests outlive GPU workers: their tokens are those of an undisturbed run, and lost instances return."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from killed_workers import Victims, has_output, is_prefilling, restarting_cluster
from machines import H200_GRAPH_LIMITS
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.snapshot import Snapshot
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

pytestmark = pytest.mark.multigpu

RESTART_SECONDS = 120.0


@pytest.fixture(scope="module")
def restarting(folder: Path) -> Iterator[Victims]:
    config = ClusterConfig(
        str(folder), num_instances=2, kv_capacity=400, device="cuda", graph_limits=H200_GRAPH_LIMITS
    )
    with restarting_cluster(config) as victims:
        yield victims


@pytest.mark.parametrize(
    ("name", "when", "victim", "num_victims"),
    [
        ("static-sp", has_output(7), 1, 1),
        ("esp", is_prefilling, 0, 1),
        ("esp", has_output(1), 0, 2),
    ],
)
def test_no_token_is_lost_or_changed_when_workers_are_killed(
    restarting: Victims,
    folder: Path,
    name: str,
    when: Callable[[Snapshot], bool],
    victim: int,
    num_victims: int,
) -> None:
    cluster, before = restarting.cluster, restarting.cluster.snapshot.stats
    policy = make_policy(name, PolicyConfig(max_num_batched_tokens=16, chunk_tokens=16, lease_steps=2))
    requests = [greedy_request(random_prompt(40 + i, seed=i), 16) for i in range(4)]
    killing = restarting.killing(policy, when, victim, num_victims)
    outputs = cluster.run(requests, killing, timeout=RESTART_SECONDS)
    assert_exact(folder, requests, outputs)
    cluster.wait_until(
        lambda snapshot: snapshot.stats.num_joins == before.num_joins + num_victims, timeout=RESTART_SECONDS
    )
    assert_exact(folder, requests, cluster.run(requests, make_policy("static-sp", PolicyConfig())))
