"""Requests outlive the instances that compute them: their tokens are those of an undisturbed run."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from child_processes import own_children
from cluster import Cluster, running_cluster
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.executor.lookahead import LookaheadMargin
from loong.launcher.serve.local import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import DEFAULT_HOST
from loong.scheduler.policy import Policy, make_policy

NUM_INSTANCES = 3


@pytest.fixture(scope="module")
def restarting(folder: Path) -> Iterator[Cluster]:
    config = ClusterConfig(str(folder), num_instances=NUM_INSTANCES, kv_capacity=256)
    with running_cluster(config, lookahead=LookaheadMargin.on(DEFAULT_HOST), restarts=True) as cluster:
        yield cluster


def killing(policy: Policy, when: Callable[[Snapshot], bool], number: int, victims: int = 1) -> Policy:
    """The policy, which kills some workers once, as soon as `when` holds of a snapshot after its plan."""
    killed: list[int] = []

    def kills(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
        plan = policy(snapshot, cost_model)
        if not killed and when(snapshot):
            pids = own_children("loong.worker.process")
            killed.extend(pids[(number + i) % len(pids)] for i in range(victims))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
        return plan

    return kills


def has_output(num_tokens: int) -> Callable[[Snapshot], bool]:
    """Return whether some request has so many output tokens."""
    return lambda snapshot: any(view.num_output_tokens >= num_tokens for view in snapshot.running)


def is_prefilling(snapshot: Snapshot) -> bool:
    """Return whether the second chunk of a prompt is next."""
    return any(0 < view.num_computed_tokens < view.num_prompt_tokens for view in snapshot.running)


def run_with_losses(
    cluster: Cluster,
    folder: Path,
    policy: Policy,
    when: Callable[[Snapshot], bool],
    number: int,
    victims: int,
) -> None:
    """Run requests of which some lose instances, and wait until these have joined again."""
    before = cluster.snapshot.stats
    requests = [greedy_request(random_prompt(40 + i, seed=i), 16) for i in range(4)]
    outputs = cluster.run(requests, killing(policy, when, number, victims), timeout=60)
    assert_exact(folder, requests, outputs)
    cluster.wait_until(lambda snapshot: snapshot.stats.num_joins == before.num_joins + victims)
    assert cluster.snapshot.stats.num_losses == before.num_losses + victims
    assert len(cluster.snapshot.instances) == NUM_INSTANCES


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("esp", is_prefilling),
        ("esp", has_output(1)),
        ("static-sp", has_output(7)),
        ("replicas", has_output(1)),
    ],
)
def test_no_token_is_lost_or_changed_when_an_instance_is_killed(
    restarting: Cluster, folder: Path, name: str, when: Callable[[Snapshot], bool], victim: int
) -> None:
    policy = make_policy(name, PolicyConfig(max_num_batched_tokens=16, chunk_tokens=16))
    run_with_losses(restarting, folder, policy, when, victim, 1)


@pytest.mark.parametrize("victims", [2, 3])
def test_requests_outlive_the_loss_of_several_instances_at_once(
    restarting: Cluster, folder: Path, victims: int
) -> None:
    run_with_losses(restarting, folder, make_policy("esp", PolicyConfig()), has_output(3), 0, victims)
