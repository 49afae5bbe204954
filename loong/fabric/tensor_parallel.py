"""Collectives inside one instance, built on messages between its ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

GatherShards = Callable[[Tensor], list[Tensor]]


class TensorParallelGroup:
    """All-reduce and all-gather in which all ranks compute the same sums in the same order.

    So all ranks of an instance hold bitwise equal activations, and sample the same token.
    """

    def __init__(self, rank: int, size: int, gather_shards: GatherShards) -> None:
        self.rank = rank
        self.size = size
        self._gather_shards = gather_shards  # x -> every rank's x, in rank order

    def all_reduce(self, x: Tensor) -> Tensor:
        """See TensorParallelVerbs."""
        accumulate_in = torch.float32 if x.is_floating_point() else x.dtype
        first, *others = self._gather_shards(x)
        total = first.to(accumulate_in, copy=True)
        for shard in others:
            total += shard
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """See TensorParallelVerbs."""
        return torch.cat(self._gather_shards(x), dim=-1)
