"""The part of one request in a batch: masters, positions, and where the new KV stays."""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import cut, dealt, first_of
from loong.core.request import RequestView
from loong.core.value import value


@value
class RequestPart:
    """The part of one request in a batch."""

    queries: tuple[QueryBlock, ...]
    writes: tuple[KVSegment, ...]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that are computed."""
        return sum(len(block.positions) for block in self.queries)

    @property
    def keeper_ids(self) -> tuple[InstanceId, ...]:
        """Return the instances that store new KV, ascending."""
        return tuple(sorted({segment.instance_id for segment in self.writes}))


def batch_of(
    group: ESPGroup, parts: Iterable[RequestPart], num_steps: int = 1, predicted_time: float | None = None
) -> BatchPlan:
    """Return the batch in which `group` carries out `parts`, a step in `predicted_time`."""
    parts = tuple(parts)
    queries = tuple([block for part in parts for block in part.queries])
    writes = tuple([segment for part in parts for segment in part.writes])
    return BatchPlan(group, queries, writes, num_steps, predicted_time)


def next_positions(view: RequestView, num_tokens: int) -> tuple[range, ...]:
    """Return the next `num_tokens` positions to compute: the first ones whose KV is missing."""
    return first_of(view.missing, num_tokens)


def decode_part(view: RequestView, master_id: InstanceId, num_steps: int = 1) -> RequestPart:
    """Return one token a step, for a lease of `num_steps` or until the request must end."""
    request_id, first = view.request_id, view.num_computed_tokens
    query = stored = range(first, first + 1)
    if num_steps > 1:
        stored = range(first, first + min(num_steps, view.num_remaining_tokens))
    block = QueryBlock(request_id, query, master_id, Transfer.QUERY)
    return RequestPart((block,), (KVSegment(request_id, stored, master_id),))


def whole_part(view: RequestView, num_tokens: int, master_id: InstanceId) -> RequestPart:
    """Return a chunk that one master computes and stores; its queries travel to KV on other instances."""
    return striped_part(view, num_tokens, ESPGroup((master_id,)), Transfer.QUERY)


def striped_part(view: RequestView, num_tokens: int, group: ESPGroup, transfer: Transfer) -> RequestPart:
    """Return a chunk in stripes of size 1 over the ring, every stripe stored where it is made."""
    stripes = dealt(next_positions(view, num_tokens), group.dop)
    blocks = tuple(
        QueryBlock(view.request_id, positions, master_id, transfer)
        for pieces, master_id in zip(stripes, group.instance_ids, strict=True)
        for positions in pieces
    )
    return RequestPart(blocks, tuple(KVSegment(view.request_id, b.positions, b.master_id) for b in blocks))


def retained_part(
    view: RequestView, num_tokens: int, group: ESPGroup, free: Mapping[InstanceId, int]
) -> RequestPart:
    """Return a striped chunk whose circulating KV is kept only by the instances of `free`.

    `free` maps instances of the group to free slots, at least `num_tokens` in total. Each keeps a stripe if
    all have room for one, so that consecutive chunks make long ranges. Otherwise each keeps a run of
    neighbors in proportion to its room.
    """
    striped = striped_part(view, num_tokens, group, Transfer.KV)
    positions, total = next_positions(view, num_tokens), sum(free.values())
    if len(free) * min(free.values()) >= num_tokens:
        parts = dealt(positions, len(free))
    else:
        parts = cut(positions, (num_tokens * n // total for n in accumulate(free.values(), initial=0)))
    writes = (
        KVSegment(view.request_id, piece, instance_id)
        for pieces, instance_id in zip(parts, free, strict=True)
        for piece in pieces
    )
    return RequestPart(striped.queries, tuple(writes))
