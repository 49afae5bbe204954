"""Steps whose requests read the same slots, along a tree of prefixes."""

from collections.abc import Sequence

import torch

from loong.attention.attention_step import AttentionStep
from loong.core.instance import ESPGroup
from loong.core.kv_layout import KVLayout, row_of_heads
from loong.core.placement import KVSegment, Placement
from loong.core.plan import BatchPlan, QueryBlock, Transfer
from loong.core.request import RequestId
from loong.worker.kv.pool import KVPool

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8


def shared_step(
    paths: Sequence[str],
    node_size: int,
    num_alone: Sequence[int],
    num_queries: Sequence[int],
    least_saved: int | None = 1,
) -> AttentionStep:
    """Return a step of one instance with a request for each path, whose letters are nodes of a tree.

    Each request has `num_alone` tokens after its path, and computes `num_queries` more.
    """
    num_slots = 2 * (sum(num_alone) + sum(num_queries) + node_size * sum(map(len, paths))) + 1
    pool = KVPool(
        KVLayout(1, row_of_heads(NUM_KV_HEADS, HEAD_DIM), "float32"), num_slots, torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(num_slots)
    pool.layer(0).copy_(torch.randn(pool.layer(0).shape, generator=generator))
    placements: dict[RequestId, Placement] = {}
    blocks, writes, nodes = [], [], set[str]()
    for number, path in enumerate(paths):
        request_id, shared = f"r{number}", []
        for depth in range(len(path)):
            node, positions = path[: depth + 1], range(depth * node_size, (depth + 1) * node_size)
            if node not in nodes:
                nodes.add(node)
                pool.allocate(node, positions)
            pool.share(node, request_id, positions)
            shared.append(KVSegment(node, positions, 0))
        start = len(path) * node_size
        rest, new = range(start, start + num_alone[number]), range(num_queries[number])
        new = range(rest.stop, rest.stop + num_queries[number])
        pool.allocate(request_id, range(rest.start, new.stop))
        held = KVSegment(request_id, range(rest.stop), 0)
        placements[request_id] = Placement((held,) if rest.stop else (), tuple(shared))
        blocks.append(QueryBlock(request_id, new, 0, Transfer.QUERY))
        writes.append(KVSegment(request_id, new, 0))
    return AttentionStep(
        0, BatchPlan(ESPGroup((0,)), tuple(blocks), tuple(writes)), placements, pool, least_saved
    )
