"""The state of the cluster at a request's arrival: queue, running batches and free slots."""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from loong.core.instance import InstanceKind
from loong.core.request import RequestId
from loong.observability.decision_log.lines import InstanceState
from loong.observability.decision_log.story.index import LogIndex


class Busy(msgspec.Struct, frozen=True):
    """Instances that run a batch. `until` is when it ended, or its predicted end; None if unknown."""

    batch_id: int
    instance_ids: tuple[int, ...]
    num_prefills: int
    num_decodes: int
    until: float | None
    is_predicted: bool


class StoryFindings(msgspec.Struct, frozen=True):
    """The cluster at an arrival. Host tiers and draining instances are neither idle nor free."""

    ahead: tuple[RequestId, ...]  # arrived before, and not started
    ahead_tokens: int  # of their prompts
    overtaken_by: tuple[RequestId, ...]  # arrived later, and started before it
    busy: tuple[Busy, ...]
    idle_ids: tuple[int, ...]
    host_ids: tuple[int, ...]
    memory_ids: tuple[int, ...]
    draining_ids: tuple[int, ...]
    lost_ids: tuple[int, ...]  # and not back
    kv_free: int
    kv_capacity: int
    most_kv_free: int  # on one instance


def found_by(index: LogIndex, request_id: RequestId) -> StoryFindings:
    """Return the state of the cluster at the arrival of a request, which the log contains."""
    arrived, arrived_at = index.arrivals[request_id], index.arrived_at
    came, left = arrived_at[request_id], _left_queue_at(index, request_id)
    ahead = tuple(r for r, at in arrived_at.items() if at < came < _left_queue_at(index, r))
    kv_free, kv_capacity = room_of(arrived.instances)
    return StoryFindings(
        ahead=ahead,
        ahead_tokens=sum(index.arrivals[r].num_prompt_tokens for r in ahead),
        overtaken_by=tuple(
            r for r, at in arrived_at.items() if at > came and index.started_at.get(r, left) < left
        ),
        busy=_busy(index, arrived.instances),
        idle_ids=idle_ids(arrived.instances),
        host_ids=tuple(i.instance_id for i in arrived.instances if i.kind is InstanceKind.HOST),
        memory_ids=tuple(i.instance_id for i in arrived.instances if i.kind is InstanceKind.ATTENTION),
        draining_ids=tuple(i.instance_id for i in arrived.instances if i.is_draining),
        lost_ids=index.lost_before[request_id],
        kv_free=kv_free,
        kv_capacity=kv_capacity,
        most_kv_free=max((room_of([i])[0] for i in arrived.instances), default=0),
    )


def room_of(instances: Iterable[InstanceState]) -> tuple[int, int]:
    """Return the free KV slots of instances that take new KV, and their capacity, in tokens."""
    pools = [i for i in instances if i.kind is not InstanceKind.HOST and not i.is_draining]
    capacity = sum(i.kv_capacity for i in pools)
    return capacity - sum(i.kv_used for i in pools), capacity


def idle_ids(instances: Iterable[InstanceState]) -> tuple[int, ...]:
    """Return the instances that a batch can run on."""
    return tuple(
        i.instance_id
        for i in instances
        if i.kind is InstanceKind.FULL and not i.is_draining and i.batch_id is None
    )


def _left_queue_at(index: LogIndex, request_id: RequestId) -> float:
    """Return the line at which a request started, or else ended; infinity if the log has neither."""
    never = float("inf")
    return index.started_at.get(request_id, index.ended_at.get(request_id, never))


def _busy(index: LogIndex, instances: Iterable[InstanceState]) -> tuple[Busy, ...]:
    by_batch: defaultdict[int, list[int]] = defaultdict(list)
    for instance in instances:
        if instance.batch_id in index.batches:
            by_batch[instance.batch_id].append(instance.instance_id)
    return tuple(_busy_with(index, batch_id, ids) for batch_id, ids in by_batch.items())


def _busy_with(index: LogIndex, batch_id: int, instance_ids: list[int]) -> Busy:
    plan, batch = index.batches[batch_id]
    end, until = index.batch_ends.get(batch_id), None
    if end is not None:
        until = end.time
    elif batch.predicted_seconds is not None:
        until = index.batch_starts.get(batch_id, plan.time) + batch.predicted_seconds * batch.num_steps
    return Busy(
        batch_id,
        tuple(instance_ids),
        num_prefills=len(batch.chunks),
        num_decodes=len(batch.decodes),
        until=until,
        is_predicted=end is None,
    )
