"""Attention of a whole step, over KV that lies anywhere in the group."""

from torch import Tensor

from loong.attention.remote import query_attention, query_layout
from loong.attention.ring import ring_attention, ring_layout
from loong.attention.step import Step
from loong.fabric.protocol import Fabric
from loong.kernels import Partial


class ElasticAttention:
    """What the model calls in each layer; made anew for each step from its plan."""

    def __init__(self, step: Step, fabric: Fabric) -> None:
        self._step, self._fabric = step, fabric
        self._queries = query_layout(step)
        self._ring = ring_layout(step)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend q [T, H, D] to the history and to k, v [T, K, D] of the step: [T, H, D] in q's dtype.

        Stores the new KV where the plan says.
        """
        total = Partial.identity(q.shape[0], q.shape[1], q.shape[2], q.device)
        rows = self._queries.stored_rows
        self._step.store.store(layer, self._queries.stored_slots, k[rows], v[rows])
        query_attention(self._queries, self._step, self._fabric, layer, q, total)
        if self._ring is not None:
            ring_attention(self._ring, self._step, self._fabric, layer, (q, k, v), total)
        return total.out.to(q.dtype)
