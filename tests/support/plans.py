"""Plans made by hand, for tests that force what a policy would only sometimes do."""

from collections.abc import Mapping, Sequence
from itertools import cycle

from loong.core.cost.cost_model import CostModel
from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, IterationPlan, KVMigration, QueryBlock, Transfer
from loong.core.positions import dealt, first_of
from loong.core.request import RequestId, RequestView
from loong.core.snapshot import Snapshot
from loong.scheduler.policy import Policy


def prefill(
    views: Sequence[RequestView],
    group: Sequence[InstanceId],
    *,
    num_tokens: int | None = None,
    masters: Sequence[InstanceId] | None = None,
    keep_on: Sequence[InstanceId] | None = None,
    transfer: Transfer = Transfer.KV,
) -> BatchPlan:
    """A chunk of up to `num_tokens` of each request, striped over `masters`; its KV stays on `keep_on`.

    It has the first missing positions. None computes all, on the whole group, and keeps each stripe where it
    is made.
    """
    masters = group if masters is None else masters
    keepers = masters if keep_on is None else keep_on
    queries: list[QueryBlock] = []
    writes: list[KVSegment] = []
    for view in views:
        count = min(num_tokens or view.num_uncomputed_tokens, view.num_uncomputed_tokens)
        chunk = first_of(view.missing, count)
        for pieces, instance_id in zip(dealt(chunk, len(masters)), masters, strict=True):
            queries += (QueryBlock(view.request_id, p, instance_id, transfer) for p in pieces)
        for pieces, instance_id in zip(dealt(chunk, len(keepers)), keepers, strict=True):
            writes += (KVSegment(view.request_id, p, instance_id) for p in pieces)
    return BatchPlan(ESPGroup(tuple(group)), tuple(queries), tuple(writes))


def decode(
    views: Sequence[RequestView],
    group: Sequence[InstanceId],
    masters: Mapping[RequestId, InstanceId],
    *,
    num_steps: int = 1,
) -> BatchPlan:
    """Return up to `num_steps` decode steps of every request, each with its master."""
    queries: list[QueryBlock] = []
    writes: list[KVSegment] = []
    for view in views:
        first, master_id = view.num_computed_tokens, masters[view.request_id]
        queries.append(QueryBlock(view.request_id, range(first, first + 1), master_id, Transfer.QUERY))
        positions = range(first, first + min(num_steps, view.num_remaining_tokens))
        writes.append(KVSegment(view.request_id, positions, master_id))
    return BatchPlan(ESPGroup(tuple(group)), tuple(queries), tuple(writes), num_steps)


def both(first: BatchPlan, second: BatchPlan) -> BatchPlan:
    """Return one batch that carries two single-step plans of the same group."""
    return BatchPlan(first.group, first.queries + second.queries, first.writes + second.writes)


def move(view: RequestView, source_id: InstanceId, destination_id: InstanceId) -> tuple[KVMigration, ...]:
    """All that a request has on one instance goes to another."""
    held = (segment for segment in view.placement.segments if segment.instance_id == source_id)
    return tuple(KVMigration(segment, destination_id) for segment in held)


def plannable(snapshot: Snapshot) -> tuple[RequestView, ...]:
    """Return the requests that a plan may name."""
    return tuple(view for view in (*snapshot.waiting, *snapshot.running) if view.is_plannable)


def in_group(
    *group: InstanceId,
    chunk: int | None = None,
    keep_on: Sequence[InstanceId] | None = None,
    transfer: Transfer = Transfer.KV,
    masters: Sequence[InstanceId] | None = None,
    num_steps: int = 1,
) -> Policy:
    """Return a policy that runs everything on one group: prefill of all first, then decode of all.

    The requests of a decode batch take turns in having each of `masters` (all of the group) for master.
    """

    def policy(snapshot: Snapshot, cost_model: CostModel, /) -> IterationPlan:
        if any(not snapshot.instance[i].is_idle for i in group):
            return IterationPlan()
        views = plannable(snapshot)
        if new := [view for view in views if not view.is_decoding]:
            return IterationPlan((prefill(new, group, num_tokens=chunk, keep_on=keep_on, transfer=transfer),))
        if not views:
            return IterationPlan()
        turns = zip(views, cycle(group if masters is None else masters))
        return IterationPlan(
            (decode(views, group, {v.request_id: i for v, i in turns}, num_steps=num_steps),)
        )

    return policy
