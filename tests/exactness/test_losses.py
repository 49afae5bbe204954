"""Requests outlive the instances that compute them: their tokens are those of an undisturbed run."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from child_processes import own_forked
from cluster import Cluster
from leak_checks import shared_cluster
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.launcher.serve.local import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.cost.cost_model import DEFAULT_HOST
from loong.scheduler.policy import Policy, make_policy

NUM_INSTANCES = 3
WORKER = "loong.worker.process"
AT_ONCE = Backoff(first=0.0, longest=0.0, max_failures=1000)


class Victims:
    """A cluster that starts lost instances again, and its workers to kill."""

    def __init__(self, cluster: Cluster, others: frozenset[int]) -> None:
        """Take the workers of other clusters, to spare them."""
        self.cluster, self._others = cluster, others

    def killing(self, policy: Policy, when: Callable[[Snapshot], bool], number: int, victims: int) -> Policy:
        """Return the policy, which kills some workers once, when a snapshot is as asked for."""
        killed: list[int] = []

        def kills(snapshot: Snapshot, cost_model: CostModel) -> IterationPlan:
            plan = policy(snapshot, cost_model)
            if not killed and when(snapshot):
                pids = own_forked(WORKER, self._others)
                killed.extend(pids[(number + i) % len(pids)] for i in range(victims))
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
            return plan

        return kills


@pytest.fixture(scope="module")
def restarting(folder: Path) -> Iterator[Victims]:
    others = frozenset(own_forked(WORKER))
    config = ClusterConfig(str(folder), num_instances=NUM_INSTANCES, kv_capacity=256)
    lookahead = LookaheadMargin.on(DEFAULT_HOST)
    with shared_cluster(config, lookahead=lookahead, backoff=AT_ONCE) as cluster:
        yield Victims(cluster, others)


def has_output(num_tokens: int) -> Callable[[Snapshot], bool]:
    """Return whether some request has this number of output tokens."""
    return lambda snapshot: any(view.num_output_tokens >= num_tokens for view in snapshot.running)


def is_prefilling(snapshot: Snapshot) -> bool:
    """Return whether the second chunk of a prompt is next."""
    return any(0 < view.num_computed_tokens < view.num_prompt_tokens for view in snapshot.running)


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
    restarting: Victims, folder: Path, name: str, when: Callable[[Snapshot], bool], victim: int
) -> None:
    policy = make_policy(name, PolicyConfig(max_num_batched_tokens=16, chunk_tokens=16, lease_steps=2))
    run_with_losses(restarting, folder, policy, when, victim, 1)


@pytest.mark.parametrize("victims", [2, 3])
def test_requests_outlive_the_loss_of_several_instances_at_once(
    restarting: Victims, folder: Path, victims: int
) -> None:
    run_with_losses(
        restarting, folder, make_policy("esp", PolicyConfig(lease_steps=2)), has_output(3), 0, victims
    )
