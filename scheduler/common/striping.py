"""The part of one request in a batch: masters, positions, and where the new KV stays."""

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise

from loong.core.instance import ESPGroup
from loong.core.placement import InstanceId, KVSegment
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import stripe
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


def batch_of(
    group: ESPGroup, parts: Iterable[RequestPart], num_steps: int = 1, predicted_time: float | None = None
) -> BatchPlan:
    """Return the batch in which `group` carries out `parts`, a step in `predicted_time`."""
    parts = tuple(parts)
    queries = tuple([block for part in parts for block in part.queries])
    writes = tuple([segment for part in parts for segment in part.writes])
    return BatchPlan(group, queries, writes, num_steps, predicted_time)


def next_positions(view: RequestView, num_tokens: int) -> range:
    """Return the next `num_tokens` positions to compute."""
    first = view.num_computed_tokens
    return range(first, first + num_tokens)


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
    positions = next_positions(view, num_tokens)
    block = QueryBlock(view.request_id, positions, master_id, Transfer.QUERY)
    return RequestPart((block,), (KVSegment(view.request_id, positions, master_id),))


def striped_part(view: RequestView, num_tokens: int, group: ESPGroup, transfer: Transfer) -> RequestPart:
    """Return a chunk in stripes of size 1 over the ring, every stripe stored where it is made."""
    positions = next_positions(view, num_tokens)
    stripes = ((stripe(positions, i, group.dop), master) for i, master in enumerate(group.instance_ids))
    blocks = tuple(QueryBlock(view.request_id, p, master, transfer) for p, master in stripes if p)
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
        parts = [stripe(positions, i, len(free)) for i in range(len(free))]
    else:
        boundaries = (num_tokens * slots // total for slots in accumulate(free.values(), initial=0))
        parts = [positions[a:b] for a, b in pairwise(boundaries)]
    kept = zip(parts, free, strict=True)
    return RequestPart(striped.queries, tuple(KVSegment(view.request_id, p, i) for p, i in kept if p))
