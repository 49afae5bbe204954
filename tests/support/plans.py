"""Plans made by hand, for tests that force what a policy would only sometimes do."""

from collections.abc import Mapping, Sequence

from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import stripe
from loong.core.request import RequestId, RequestView


def prefill(
    views: Sequence[RequestView],
    group: Sequence[InstanceId],
    *,
    num_tokens: int | None = None,
    keep_on: Sequence[InstanceId] | None = None,
    transfer: Transfer = Transfer.KV,
) -> BatchPlan:
    """A chunk of up to `num_tokens` of each request, striped over the group; its KV stays on `keep_on`.

    None computes all, and keeps each stripe where it is made.
    """
    queries: list[QueryBlock] = []
    writes: list[KVSegment] = []
    for view in views:
        count = min(num_tokens or view.num_uncomputed_tokens, view.num_uncomputed_tokens)
        chunk = range(view.num_computed_tokens, view.num_computed_tokens + count)
        for index, instance_id in enumerate(group):
            if positions := stripe(chunk, index, len(group)):
                queries.append(QueryBlock(view.request_id, positions, instance_id, transfer))
        keepers = group if keep_on is None else keep_on
        for index, instance_id in enumerate(keepers):
            if positions := stripe(chunk, index, len(keepers)):
                writes.append(KVSegment(view.request_id, positions, instance_id))
    return BatchPlan(ESPGroup(tuple(group)), tuple(queries), tuple(writes))


def decode(
    views: Sequence[RequestView],
    group: Sequence[InstanceId],
    masters: Mapping[RequestId, InstanceId],
    *,
    num_steps: int = 1,
) -> BatchPlan:
    """Up to `num_steps` decode steps of every request, each with its master."""
    queries: list[QueryBlock] = []
    writes: list[KVSegment] = []
    for view in views:
        first, master_id = view.num_computed_tokens, masters[view.request_id]
        queries.append(QueryBlock(view.request_id, range(first, first + 1), master_id, Transfer.QUERY))
        positions = range(first, first + min(num_steps, view.num_remaining_tokens))
        writes.append(KVSegment(view.request_id, positions, master_id))
    return BatchPlan(ESPGroup(tuple(group)), tuple(queries), tuple(writes), num_steps)


def both(first: BatchPlan, second: BatchPlan) -> BatchPlan:
    """One batch that carries two single-step plans of the same group."""
    return BatchPlan(first.group, first.queries + second.queries, first.writes + second.writes)
