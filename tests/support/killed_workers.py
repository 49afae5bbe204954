"""A cluster that starts lost instances again, and its workers to kill."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from child_processes import own_forked
from cluster import Cluster
from leak_checks import shared_cluster

from loong.core.cost.cost_model import CostModel
from loong.core.plan import IterationPlan
from loong.core.snapshot import Snapshot
from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.launcher.cluster.config import ClusterConfig
from loong.scheduler.cost.cost_model import DEFAULT_HOST
from loong.scheduler.policy import Policy

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


@contextmanager
def restarting_cluster(config: ClusterConfig, *, keeps_prefixes: bool = False) -> Iterator[Victims]:
    """Run a cluster, whose lost instances start again at once."""
    others = frozenset(own_forked(WORKER))
    lookahead = LookaheadMargin.on(DEFAULT_HOST)
    with shared_cluster(
        config, lookahead=lookahead, backoff=AT_ONCE, keeps_prefixes=keeps_prefixes
    ) as cluster:
        yield Victims(cluster, others)


def has_output(num_tokens: int) -> Callable[[Snapshot], bool]:
    """Return whether some request has this number of output tokens."""
    return lambda snapshot: any(view.num_output_tokens >= num_tokens for view in snapshot.running)


def is_prefilling(snapshot: Snapshot) -> bool:
    """Return whether the second chunk of a prompt is next."""
    return any(0 < view.num_computed_tokens < view.num_prompt_tokens for view in snapshot.running)
