"""Clusters at one moment, made by hand."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from simulation import instances_with

from loong.core.placement import InstanceId, Placement, striped, tokens_by_instance
from loong.core.plan import BatchPlan
from loong.core.request import SLO, RequestView
from loong.core.snapshot import RunningBatch, Snapshot


def waiting(
    request_id: str,
    num_prompt: int,
    max_tokens: int = 16,
    *,
    arrival_time: float = 0.0,
    slo: SLO | None = None,
) -> RequestView:
    """Return a request without KV."""
    return RequestView(request_id, num_prompt, 0, max_tokens, arrival_time, slo, Placement())


def begun(
    request_id: str,
    num_prompt: int,
    num_computed: int,
    instance_ids: tuple[InstanceId, ...],
    max_tokens: int = 16,
) -> RequestView:
    """Return a request whose prompt is computed in part, striped over these instances."""
    placement = striped(request_id, range(num_computed), instance_ids)
    return RequestView(request_id, num_prompt, 0, max_tokens, 0.0, None, placement)


def decoding(
    request_id: str,
    num_prompt: int,
    instance_ids: tuple[InstanceId, ...],
    max_tokens: int = 16,
    num_output: int = 1,
) -> RequestView:
    """Return a request that has produced tokens, its KV striped over these instances."""
    placement = striped(request_id, range(num_prompt + num_output - 1), instance_ids)
    return RequestView(request_id, num_prompt, num_output, max_tokens, 0.0, None, placement)


def running(
    batch_id: int, plan: BatchPlan, started_at: float = 0.0, num_steps_taken: int = 0
) -> RunningBatch:
    """Return a batch in flight without an early end, whose steps took the predicted time."""
    stepped_at = started_at + num_steps_taken * (plan.predicted_time or 0.0)
    return RunningBatch(batch_id, plan, started_at, num_steps_taken, plan.num_steps, stepped_at)


def snapshot_of(
    capacities: Iterable[int],
    views: Iterable[RequestView] = (),
    batches: Sequence[RunningBatch] = (),
    *,
    now: float = 0.0,
) -> Snapshot:
    """Return instances 0, 1, ... with these pools, used by the KV of `views` and the writes of `batches`.

    Views of a batch get its id.
    """
    batch_of = {request_id: batch.batch_id for batch in batches for request_id in batch.plan.request_ids}
    on = {i: batch.batch_id for batch in batches for i in batch.plan.group.instance_ids}
    views = [replace(view, batch_id=batch_of.get(view.request_id)) for view in views]
    used = tokens_by_instance(
        [s for v in views for s in v.placement.segments] + [s for b in batches for s in b.plan.writes]
    )
    instances = tuple(
        instance.using(used[instance.instance_id]).running(on.get(instance.instance_id))
        for instance in instances_with(capacities)
    )
    return Snapshot(
        now,
        instances,
        tuple(view for view in views if not view.has_begun),
        tuple(view for view in views if view.has_begun),
        tuple(batches),
    )
