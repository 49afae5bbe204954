"""GPUs of two hosts, one each, are one cluster: exact at every DoP, and a worker that dies joins again."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_processes import own_forked
from cluster import Cluster
from leak_checks import shared_cluster
from machines import H200_GRAPH_LIMITS
from plans import in_group
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan, Transfer
from loong.core.snapshot import Snapshot
from loong.executor.recovery import Backoff
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

pytestmark = pytest.mark.multigpu


@pytest.fixture(scope="module")
def spread(folder: Path) -> Iterator[Cluster]:
    """Yield instances 0 and 1, each on a GPU that counts as a host, which start again when they are lost."""
    config = ClusterConfig(
        str(folder),
        num_instances=2,
        num_hosts=2,
        kv_capacity=400,
        start_timeout=100.0,
        device="cuda",
        graph_limits=H200_GRAPH_LIMITS,
    )
    with shared_cluster(config, backoff=Backoff(first=0.0, longest=0.0)) as running:
        yield running


@pytest.mark.parametrize("group", [(0,), (1, 0)])
@pytest.mark.parametrize("transfer", Transfer)
@pytest.mark.parametrize("num_steps", [1, 5])
def test_groups_across_hosts_give_the_tokens_of_transformers(
    spread: Cluster, folder: Path, group: tuple[int, ...], transfer: Transfer, num_steps: int
) -> None:
    requests = [greedy_request(random_prompt(length, seed=length), 12) for length in (50, 33, 7)]
    policy = in_group(*group, chunk=19, transfer=transfer, num_steps=num_steps)
    assert_exact(folder, requests, spread.run(requests, policy))


def test_streams_outlive_a_worker_that_is_killed_and_it_joins_again(spread: Cluster, folder: Path) -> None:
    esp = make_policy("esp", PolicyConfig(max_num_batched_tokens=16, chunk_tokens=16, lease_steps=2))
    everywhere = make_policy("static-sp", PolicyConfig(chunk_tokens=16))
    has_lost = False

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        nonlocal has_lost
        plan = (esp if has_lost else everywhere)(snapshot, cost_model)
        if not has_lost and any(view.num_output_tokens for view in snapshot.running):
            has_lost = True
            os.kill(own_forked("loong.worker.process")[-1], signal.SIGKILL)
        return plan

    requests = [greedy_request(random_prompt(40 + i, seed=i), 16) for i in range(4)]
    assert_exact(folder, requests, spread.run(requests, policy, timeout=90))
    spread.wait_until(lambda snapshot: snapshot.stats.num_joins == 1, timeout=60)
    again = [greedy_request(random_prompt(60, seed=60), 8)]
    assert_exact(folder, again, spread.run(again, everywhere))
