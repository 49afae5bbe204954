"""Scaling as published: the instances that keep a prefill's KV, and those that a decode batch needs."""

from collections.abc import Sequence

from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId
from loong.core.plan import BatchPlan
from loong.core.request import RequestView
from loong.scheduler.common.leases import latest_in_the_way, timed_batch
from loong.scheduler.common.planning_view import InstanceSet
from loong.scheduler.common.striping import RequestPart, retained_part, whole_part
from loong.scheduler.paper.cluster import DecodeBatch, PaperCluster, age


def prefill_batch(
    cluster: PaperCluster, instance_ids: Sequence[InstanceId], prompts: Sequence[RequestView]
) -> BatchPlan:
    """Return whole prompts striped over all the instances; the fewest that hold all of their KV keep it."""
    group = tuple(sorted(instance_ids))
    num_tokens = sum(view.num_uncomputed_tokens for view in prompts)
    kept: dict[InstanceId, int] = {}
    for i in sorted(group, key=lambda i: (-cluster.free[i], i)):
        if sum(kept.values()) < num_tokens:
            kept[i] = cluster.free[i]
    parts = []
    for view in prompts:
        part = _part(view, group, kept)
        for segment in part.writes:
            kept[segment.instance_id] -= len(segment.positions)
        parts.append(part)
    return timed_batch(group, prompts, parts, cluster.cost_model)


def repair(cluster: PaperCluster, instance_set: InstanceSet) -> BatchPlan | list[RequestView]:
    """Return a prefill of all KV that requests of an instance set have lost; others wait for it.

    Where slots lack, it takes idle instances, those with most free slots first. If they still lack, return
    the requests whose KV must go: the latest arrivals, or all that have lost KV.
    """
    instance_ids, prompts = list(instance_set.instance_ids), instance_set.prefills
    views = prompts + instance_set.decodes
    num_needed = sum(view.num_uncomputed_tokens for view in views)
    for i in sorted(cluster.idle, key=lambda i: (-cluster.free[i], i)):
        if cluster.num_free(instance_ids) < num_needed and i not in cluster.emptying:
            cluster.idle.remove(i)
            instance_ids.append(i)
    num_free = cluster.num_free(instance_ids)
    if num_free < num_needed:
        return latest_in_the_way(views, num_free) or prompts
    return prefill_batch(cluster, instance_ids, prompts)


def _part(view: RequestView, group: tuple[InstanceId, ...], kept: dict[InstanceId, int]) -> RequestPart:
    if len(group) == 1:
        return whole_part(view, view.num_uncomputed_tokens, group[0])
    return retained_part(view, view.num_uncomputed_tokens, ESPGroup(group), kept)


def find_slots(cluster: PaperCluster) -> bool:
    """Scale up batches without free slots; return whether all then have one for each request.

    Oldest first, a batch takes idle instances, then merges with batches not in flight that have spare slots.
    """
    for batch in sorted((b for b in cluster.decoding if b.is_ready), key=age):
        if batch not in cluster.decoding:  # merged
            continue
        while cluster.num_free(batch.instance_ids) < len(batch.views):
            if not _add_idle(cluster, batch, cluster.idle) and not _merge(cluster, batch):
                return False
    return True


def scale_up(cluster: PaperCluster, batch: DecodeBatch, idle: list[InstanceId]) -> None:
    """Add idle instances to a batch not in flight while its next lease lacks slots, or is compute-bound.

    It is compute-bound once its tokens take an instance longer than beginning a step and reading the weights.
    """
    terms = cluster.cost_model.prefill_terms(1)
    bound = terms.least / terms.per_token if terms.per_token else float("inf")
    while (
        cluster.num_free(batch.instance_ids) < cluster.num_demanded(batch)
        or len(batch.views) > bound * len(batch.instance_ids)
    ) and _add_idle(cluster, batch, idle):
        pass


def _add_idle(cluster: PaperCluster, batch: DecodeBatch, idle: list[InstanceId]) -> bool:
    """Add the idle instance with most free slots, if one has any."""
    candidates = [i for i in idle if i not in cluster.emptying and cluster.free[i] > 0]
    if not candidates:
        return False
    chosen = max(candidates, key=lambda i: (cluster.free[i], -i))
    idle.remove(chosen)
    batch.instance_ids = tuple(sorted((*batch.instance_ids, chosen)))
    return True


def _merge(cluster: PaperCluster, batch: DecodeBatch) -> bool:
    """Merge with the batch not in flight that has most spare slots, if any has."""

    def num_spare(other: DecodeBatch) -> int:
        return cluster.num_free(other.instance_ids) - len(other.views)

    others = [b for b in cluster.decoding if b.is_ready and b is not batch and num_spare(b) > 0]
    if not others:
        return False
    other = max(others, key=num_spare)
    cluster.decoding.remove(other)
    batch.instance_ids = tuple(sorted((*batch.instance_ids, *other.instance_ids)))
    batch.views = [*batch.views, *other.views]
    return True
