"""Finds slots that have leaked in the pools of workers, which the engine's accounting cannot see."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cluster import Cluster, running_cluster
from plans import move, plannable, prefill
from requests_for_tests import greedy_request, random_prompt

from loong.core.cost.cost_model import CostModel
from loong.core.events import MigrationFinished
from loong.core.instance import ElasticInstance, InstanceKind
from loong.core.placement import InstanceId
from loong.core.plan import IterationPlan, Transfer
from loong.core.request import RequestId
from loong.core.snapshot import Snapshot
from loong.executor.lookahead import LookaheadMargin
from loong.executor.recovery import Backoff
from loong.launcher.cluster.config import ClusterConfig
from loong.processes.fork_server import ForkServer
from loong.scheduler.policy import Policy


@contextmanager
def shared_cluster(
    config: ClusterConfig,
    believed: tuple[ElasticInstance, ...] | None = None,
    lookahead: LookaheadMargin | None = None,
    *,
    backoff: Backoff | None = None,
    fork_server: ForkServer | None = None,
    keeps_prefixes: bool = False,
) -> Iterator[Cluster]:
    """Yield a `running_cluster` for many tests; when they are done, no slot of any pool may have leaked."""
    with running_cluster(
        config, believed, lookahead, backoff=backoff, fork_server=fork_server, keeps_prefixes=keeps_prefixes
    ) as cluster:
        yield cluster
        full = [i for i in config.instances if i.kind is InstanceKind.FULL]
        tiers = [i for i in config.instances if i.kind is InstanceKind.HOST]
        chunk = None if config.windows is None else config.windows.capacity // 4
        _fill_instances(cluster, full, chunk)
        _fill_memory(cluster, [i for i in config.instances if i.kind is InstanceKind.ATTENTION], chunk)
        _fill_tiers(cluster, full, tiers, chunk)


def _fill_instances(cluster: Cluster, instances: Sequence[ElasticInstance], chunk: int | None) -> None:
    """A worker that cannot store what its instance has room for fails, and its engine with it."""
    requests = [greedy_request(random_prompt(i.kv_capacity, seed=0), 1) for i in instances]
    homes = {r.request_id: i.instance_id for r, i in zip(requests, instances, strict=True)}
    cluster.run(requests, _prefilling_and_offloading(cluster, homes, {}, chunk))


def _fill_memory(cluster: Cluster, instances: Sequence[ElasticInstance], chunk: int | None) -> None:
    """The same where KV is pushed to memory instances."""
    requests = [greedy_request(random_prompt(i.kv_capacity, seed=0), 1) for i in instances]
    homes = {r.request_id: i.instance_id for r, i in zip(requests, instances, strict=True)}

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        if snapshot.batches:
            return IterationPlan()
        views, transfer = plannable(snapshot)[:1], Transfer.KV if chunk is None else Transfer.QUERY
        return IterationPlan(
            tuple(
                prefill(
                    [v],
                    cluster.full_ids[:1],
                    keep_on=(homes[v.request_id],),
                    num_tokens=chunk,
                    transfer=transfer,
                )
                for v in views
            )
        )

    cluster.run(requests, policy)


def _fill_tiers(
    cluster: Cluster,
    instances: Sequence[ElasticInstance],
    tiers: Sequence[ElasticInstance],
    chunk: int | None,
) -> None:
    """A tier that cannot take what it has room for rolls the migration back."""
    requests = [greedy_request(random_prompt(tier.kv_capacity, seed=0), 2) for tier in tiers]
    homes = {r.request_id: i.instance_id for r, i in zip(requests, instances, strict=False)}
    tier_ids = {r.request_id: i.instance_id for r, i in zip(requests, tiers, strict=True)}
    cluster.run(requests, _prefilling_and_offloading(cluster, homes, tier_ids, chunk))
    committed = [reported.is_committed for reported in cluster.log if isinstance(reported, MigrationFinished)]
    assert committed == [True] * len(tiers), "slots of host tiers have leaked"


def _prefilling_and_offloading(
    cluster: Cluster,
    homes: Mapping[RequestId, InstanceId],
    tier_ids: Mapping[RequestId, InstanceId],
    chunk: int | None,
) -> Policy:
    """Prefill each request at home; if that does not end it, offload it once, and let its client go."""
    offloaded: set[RequestId] = set()

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        for view in plannable(snapshot):
            request_id, home_id = view.request_id, homes[view.request_id]
            if view.num_computed_tokens < view.num_prompt_tokens:
                return IterationPlan((prefill([view], (home_id,), num_tokens=chunk),))
            if request_id not in offloaded:
                offloaded.add(request_id)
                return IterationPlan(migrations=move(view, home_id, tier_ids[request_id]))
            cluster.abort(request_id)
        return IterationPlan()

    return policy
