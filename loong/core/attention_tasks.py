"""The attention of one step of a plan, as arithmetic on ranges: queries, keys and values, and instances.

Workers take from it what they attend and where they send queries. Tests hold it to the definition of causal
attention.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loong.core.placement import InstanceId, KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.positions import intersection
from loong.core.request import RequestId


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """One block of queries attends one segment, on one instance."""

    block: QueryBlock
    segment: KVSegment
    instance_id: InstanceId


def fresh_segments(batch: BatchPlan, request_id: RequestId) -> tuple[KVSegment, ...]:
    """Return the KV that a step makes of one request, on the instances that make it."""
    return tuple(
        KVSegment(request_id, block.positions, block.master_id) for block in batch.blocks_of(request_id)
    )


def attention_tasks(
    batch: BatchPlan, placements: Mapping[RequestId, Placement], window: int | None = None
) -> Iterator[AttentionTask]:
    """Return all attention of one step, except pairs that the mask removes entirely.

    `placements` is the KV before the step. KV that travels is attended at the block's master, KV that stays
    is attended where it is. In layers with a window, queries see that many positions, their own among them.
    """
    for request_id in batch.request_ids:
        history = placements[request_id].segments
        fresh = fresh_segments(batch, request_id)
        for block in batch.blocks_of(request_id):
            for segment in (*history, *fresh):
                if sees(block.positions, segment.positions, window):
                    moves_kv = block.transfer is Transfer.KV
                    where = block.master_id if moves_kv else segment.instance_id
                    yield AttentionTask(block, segment, where)


def sees(queries: range, keys: range, window: int | None) -> bool:
    """Return whether a query may see a key, by the first and last of each and a layer's window."""
    return keys[0] <= queries[-1] and (window is None or keys[-1] > queries[0] - window)


def num_retained_tokens(batch: BatchPlan) -> int:
    """Return the tokens whose KV stays on another instance than the one that makes it (scale-down)."""
    total = 0
    for request_id in batch.request_ids:
        blocks = batch.blocks_of(request_id)
        if blocks[0].transfer is Transfer.QUERY and not batch.pushes:  # whose KV stays at its masters
            continue
        for segment in batch.writes_of(request_id):
            made = [block.positions for block in blocks if block.master_id == segment.instance_id]
            at_home = sum(len(intersection(segment.positions, positions)) for positions in made)
            total += len(segment.positions) - at_home
    return total
