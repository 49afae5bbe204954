"""An instance that fails again and again is given up. The others serve on; without any the engine ends."""

import os
import signal
import time
from pathlib import Path

import pytest
from child_processes import own_forked
from cluster import Cluster, running_cluster
from requests_for_tests import assert_exact, greedy_request, random_prompt

from loong.core.errors import ClusterError, InvalidRequestError
from loong.engine.health import HealthState, Trouble
from loong.executor.recovery import Backoff
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.config import PolicyConfig
from loong.scheduler.policy import make_policy

WORKER = "loong.worker.process"
MAX_FAILURES = 3
ESP = make_policy("esp", PolicyConfig())


def end_again_and_again(cluster: Cluster, pid: int, others: set[int]) -> None:
    """Kill the process of an instance, and those that take its place, until it is given up."""
    for number in range(1, MAX_FAILURES + 1):
        before = cluster.snapshot.stats
        os.kill(pid, signal.SIGKILL)
        if number < MAX_FAILURES:
            cluster.wait_until(lambda snapshot, n=before.num_joins: snapshot.stats.num_joins == n + 1)  # type: ignore[misc]
            pid = successor(pid, others)


def successor(pid: int, others: set[int]) -> int:
    """Return the process that has taken the place of another, once it is there."""
    while not (found := set(own_forked(WORKER)) - {*others, pid}):
        time.sleep(0.01)  # processes that end meanwhile can hide it in the list of children
    (new_pid,) = found
    return new_pid


def test_a_crash_loop_ends_in_quarantine_and_a_cluster_without_instances_ends(folder: Path) -> None:
    foreign = set(own_forked(WORKER))
    config = ClusterConfig(str(folder), num_instances=2, kv_capacity=128)
    backoff = Backoff(first=0.01, longest=0.01, steady=3600.0, max_failures=MAX_FAILURES)
    too_long = greedy_request(random_prompt(150, seed=1), 4)  # for one instance
    requests = [greedy_request(random_prompt(30 + i, seed=i), 6) for i in range(3)]
    with running_cluster(config, backoff=backoff) as cluster:
        first, second = own_forked(WORKER, foreign)
        end_again_and_again(cluster, second, {*foreign, first})
        cluster.wait_until(lambda snapshot: len(snapshot.pools) == 1 and not snapshot.returning)
        degraded = cluster.health
        assert (degraded.state, degraded.troubles) == (HealthState.DEGRADED, {1: Trouble.QUARANTINED})
        assert_exact(folder, requests, cluster.run(requests, ESP))
        with pytest.raises(InvalidRequestError, match=r"needs KV for 153 tokens.* that of 128"):
            cluster.run([too_long], ESP)

        end_again_and_again(cluster, first, foreign)
        with pytest.raises(ClusterError, match="no instance is left"):
            cluster.wait_until(lambda _: False)
        dead = cluster.health
        assert dead.state is HealthState.DEAD
        assert "quarantined" in dead.message
